"""Signed addresses of files: when new ones are requested."""

from __future__ import annotations

from support.clock import FakeClock

from tinker_sync.transport.files.signed import SignedLinks, SignedUrls


def test_addresses_that_were_renewed_meanwhile_are_not_renewed_again() -> None:
    signed: list[int] = []

    def sign() -> SignedUrls:
        signed.append(len(signed))
        return SignedUrls({"a": f"http://files/{len(signed)}"}, None)

    links = SignedLinks(sign, FakeClock())
    _, number = links.get("a")
    links.renew(number)  # one part found them refused
    assert links.get("a")[0] == "http://files/2"
    links.renew(number)  # so did another part, which had used the old ones
    assert links.get("a")[0] == "http://files/2"
    assert len(signed) == 2
