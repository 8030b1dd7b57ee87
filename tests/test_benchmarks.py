"""The benchmark command runs, its table has every subject, and its files can be read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks._model import check_model
from benchmarks._processes import Relayed, Server, network

ROOT = Path(__file__).resolve().parents[1]


def test_one_scenario_and_one_curve_from_end_to_end(tmp_path: Path) -> None:
    figures, charts = tmp_path / "figures.json", tmp_path / "charts"
    command = [sys.executable, "-m", "benchmarks", "--without-reference", "--quick", "--rounds", "1"]
    command += ["--only", "start", "chunks", "--json", str(figures), "--charts", str(charts)]
    command += ["--minutes", "0"]  # every part still makes one round
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fresh interpreter to the first sample" in done.stdout
    assert "chunks: a piece at 80 costs" in done.stdout
    found = json.loads(figures.read_text(encoding="utf-8"))
    [started] = found["scenarios"]["start"]["tinker_sync"]
    assert not started["numpy"]
    assert started["modules"] > found["scenarios"]["start"]["nothing"][0]["modules"]
    assert [size for size, _ in found["curves"]["chunks"]["tinker_sync"]] == [1, 5, 20, 80]
    drawn = ET.parse(charts / "chunks.svg").getroot()  # a file that the benchmark has written
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}circle")) == 4


def test_the_network_of_the_benchmarks_forwards_bytes_and_counts_round_trips_in_line() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        network(_server_at(listener), 1, 50e6) as relayed,
    ):
        address = "127.0.0.1", int(relayed.url.rpartition(":")[2])

        def open_both() -> tuple[socket.socket, socket.socket]:
            ours = socket.create_connection(address, 60)
            return ours, listener.accept()[0]

        first, first_served = open_both()
        with first, first_served:
            first.sendall(b"a" * 100_000)  # its pieces are one round trip
            assert _read(first_served, 100_000) == b"a" * 100_000
            first_served.sendall(b"b")
            assert _read(first, 1) == b"b"
            assert _counts(relayed) == {"connections": 1, "opened": 1, "round_trips": 2}
            first.sendall(b"c")
            second, second_served = open_both()  # beside the request, and not in line with it
            with second, second_served:
                _read(first_served, 1)
                first_served.sendall(b"d")
                _read(first, 1)
                second.sendall(b"e")
                _read(second_served, 1)
                second_served.sendall(b"f")
                _read(second, 1)
        assert _counts(relayed) == {"connections": 2, "opened": 2, "round_trips": 4}


def _counts(relayed: Relayed) -> dict[str, float]:
    counted = relayed.figures()
    assert counted.pop("network_cpu_s") > 0
    return counted


def _server_at(listener: socket.socket) -> Server:
    port = listener.getsockname()[1]
    return Server(f"http://127.0.0.1:{port}", os.getpid(), port)


def _read(sock: socket.socket, count: int) -> bytes:
    sock.settimeout(60)
    octets = b""
    while len(octets) < count and (more := sock.recv(count)):
        octets += more
    return octets


def test_the_model_names_a_curve_that_bends_upward() -> None:
    flat, bent = [(1, 2.0), (80, 1.0), (200, 1.1)], [(1, 2.0), (80, 1.0), (200, 1.6)]
    crowd = [
        {"cpu_ms": 0.5, "wall_ms": 1.0},
        {"cpu_ms": 0.4, "wall_ms": 0.8},
        {"cpu_ms": 0.5, "wall_ms": 0.8},
    ]
    lines = list(check_model({"crowd": {"us": crowd}}, {"a": {"us": flat}, "b": {"us": bent}}, "us", {}))
    assert lines == [
        "one core allows 1 / CPU a sample: 2,000 samples a second, measured 1,250",
        "a: a piece at 200 costs 1.10 times the lowest",
        "b: a piece at 200 costs 1.60 times the lowest, THE CURVE BENDS UPWARD",
    ]
