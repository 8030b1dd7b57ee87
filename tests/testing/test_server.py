"""`LocalServer`: start and end, recorded calls, and reproducible numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.embedded import Wire
from support.training_job import MODEL, train

import tinker_sync
from tinker_sync.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
)
from tinker_sync.local.store import Store
from tinker_sync.testing import FaultPlan, LocalServer, faults


def local(plan: FaultPlan | None = None, **options: Any) -> LocalServer:
    return LocalServer(plan, **{"model": MODEL, **options})


def models(client: tinker_sync.ServiceClient) -> list[str | None]:
    return [model.model_name for model in client.get_server_capabilities().supported_models]


# ------------------------------------------------------------------------------------------ start and end


def test_environment_variables_point_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with local() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        with tinker_sync.ServiceClient() as client:
            assert models(client) == [MODEL]
            assert client.holder.settings.pace == server.pace


def test_a_program_may_end_without_closing_the_server(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
from tinker_sync.testing import LocalServer
if __name__ == "__main__":
    server = LocalServer(model={MODEL!r}, data_dir={str(tmp_path / "data")!r}).start()
    service = server.service()
    training = service.create_lora_training_client({MODEL!r}, rank=2)
    training.save_state("a").result()
"""
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(Path(tinker_sync.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with Store(tmp_path / "data") as store:
        [session] = store.list_sessions(10, 0)[0]
        status = store.session(session).status
        assert getattr(status, "type", None) == "client_finished"


def test_a_step_without_a_pass_is_a_step_that_the_log_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tinker_sync.local")
    with local() as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=2)
        datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1]), {"target_tokens": [2]})
        training.forward_backward([datum], "cross_entropy")
        assert training.optim_step(tinker_sync.AdamParams()).result().metrics["grad_norm"] > 0
        assert "has no gradients" not in caplog.text
        training.forward([datum], "cross_entropy")
        assert training.optim_step(tinker_sync.AdamParams()).result().metrics["grad_norm"] == 0
        assert "has no gradients" in caplog.text


def test_use_before_start_and_after_close() -> None:
    server = local()
    for use in (lambda: server.url, server.service, server.environment, server.restart):
        with pytest.raises(ConfigurationError, match="not running"):
            use()
    server.close()
    server.start()
    with pytest.raises(ConfigurationError, match="running already"):
        server.start()
    service = server.service()
    assert models(service) == [MODEL]
    server.close()
    server.close()
    with pytest.raises(tinker_sync.ClientClosedError):
        service.get_server_capabilities()
    assert len(server.calls_to("get_server_capabilities")) == 1
    assert "not running" in repr(server)


def test_close_leaves_no_thread_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = threading.enumerate()
    with local() as server, server.service() as service:
        train(service, steps=1)
        assert list(tmp_path.iterdir())
        assert any(thread.name.startswith("tinker-") for thread in threading.enumerate())
    assert list(tmp_path.iterdir()) == []
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_a_restart_keeps_checkpoints_and_loses_models(tmp_path: Path) -> None:
    with local(data_dir=tmp_path / "data") as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=4).result()
        path = training.save_state("kept").result(120).path
        url = server.url
        server.restart()
        assert server.url == url
        with pytest.raises(NotFoundError, match="not in memory"):
            training.optim_step(tinker_sync.AdamParams()).result(120)
        with server.service() as another:
            resumed = another.create_training_client_from_state(path).result()
            assert resumed.optim_step(tinker_sync.AdamParams()).result(120) is not None


def test_a_sample_under_way_is_taken_again_after_a_restart() -> None:
    with local() as server, server.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()
        prompt = tinker_sync.ModelInput.from_ints([1, 2, 3])
        params = tinker_sync.SamplingParams(max_tokens=3000, seed=1, stop=[])
        sample = sampling.sample(prompt, 1, params)
        server.wait_for_calls("retrieve_future", timeout=120)
        server.restart()
        assert len(sample.result(120).sequences[0].tokens) == 3000


def test_what_the_server_has_no_more() -> None:
    with pytest.raises(TypeError, match=r"python -m tinker_sync\.local"):
        LocalServer(process=True)


# ------------------------------------------------------------------------------------------ recorded calls
def test_calls_are_recorded_in_order() -> None:
    with local() as server, server.service() as service:
        train(service, steps=1)
        names = [call.endpoint for call in server.calls if call.endpoint != "retrieve_future"]
        assert set(names[:3]) == {"client_config", "dynamic_config", "create_session"}  # sent together
        assert names[3:7] == ["create_model", "forward_backward", "optim_step", "save_weights_for_sampler"]
        [passed] = server.calls_to("forward_backward")
        assert passed.request.forward_backward_input.loss_fn == "cross_entropy"
        [stepped] = server.calls_to("optim_step")
        assert stepped.body["adam_params"]["learning_rate"] == 1e-2
        assert (stepped.status, stepped.over.is_set()) == (200, True)
        assert all(
            earlier.at_s <= later.at_s for earlier, later in zip(server.calls, server.calls[1:], strict=False)
        )


def test_calls_to_an_unknown_endpoint_are_refused() -> None:
    with local() as server:
        for ask in (server.calls_to, server.wait_for_calls):
            with pytest.raises(InvalidInputError, match="did you mean 'asample'"):
                ask("sample")
        assert server.calls_to("*") == []


def test_wait_for_calls() -> None:
    with local() as server, server.service() as service:
        with pytest.raises(TimeoutError, match=r"expected 1 calls to asample, received 0 in 0\.01 s"):
            server.wait_for_calls("asample", timeout=0.01)
        thread = threading.Thread(target=models, args=(service,))
        thread.start()
        assert len(server.wait_for_calls("get_server_capabilities")) == 1
        thread.join(120)


def test_forget_drops_plan_and_calls() -> None:
    plan = FaultPlan().on("get_server_capabilities", faults.status(503), nth=1)
    with local(plan) as server, server.service() as service:
        assert server.plan == plan
        models(service)
        assert len(server.calls_to("get_server_capabilities")) == 2
        server.forget()
        assert (server.plan, server.calls, server.pending_faults) == (FaultPlan(), [], ())
        server.plan = plan
        models(service)
        assert [call.status for call in server.calls] == [503, 200]


def test_close_raises_the_exception_of_a_predicate() -> None:
    plan = FaultPlan().on("get_server_capabilities", faults.reset(), when=lambda call: call.body["typo"])

    def look(failure: Exception | None = None) -> None:
        with local(plan) as server, server.service() as service:
            models(service)
            if failure is not None:
                raise failure

    with pytest.raises(TypeError, match="not subscriptable"):
        look()
    with pytest.raises(ZeroDivisionError):
        look(ZeroDivisionError("the failure of the test itself comes first"))


# ------------------------------------------------------------------------------------------ the same numbers
def test_numbers_depend_on_the_seed() -> None:
    outcomes = []
    for seed in (7, 7, 8):
        with local(seed=seed) as server, server.service() as service:
            outcomes.append(train(service, seed=None))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["tokens"] != outcomes[2]["tokens"]
    assert outcomes[0]["losses"][1] != outcomes[2]["losses"][1]


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422])
def test_a_planned_refusal_uses_up_its_number(code: int) -> None:
    """The server does not wait for the number of a call that the plan refuses, and carries out the next."""
    plan = FaultPlan().on("optim_step", faults.status(code), nth=1)
    with LocalServer(plan, model="tinker-sync/random", gap_patience_s=600.0) as server:
        wire = Wire(server.url, server.key)
        session = wire.session()
        making = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tinker-sync/random",
            "lora_config": {"rank": 4},
        }
        model = wire.result(wire.ok("/create_model", making)["request_id"])["model_id"]
        assert wire.optim(model, 1).status == code
        assert "metrics" in wire.result(wire.optim(model, 2).json()["request_id"])
        assert "metrics" in wire.result(wire.optim(model, 1).json()["request_id"])  # the number is free
        assert [call.status for call in server.calls_to("optim_step")] == [code, 200, 200]


def test_a_failed_start_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for wrong in ({"model": "no/such/model"}, {"no_such_setting": 1}):
        server = local(**wrong)
        with pytest.raises(
            (InvalidInputError, ConfigurationError),
            match=r"no model in .*no/such/model; give|no_such_setting",
        ):
            server.start()
        assert list(tmp_path.iterdir()) == []
