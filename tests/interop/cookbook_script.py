"""Training loops of the cookbook for the reference client, each for a few steps on the tiny model.

    python cookbook_script.py URL KEY FOLDER [NAME...]

It prints the outcome of each loop, or of those that are named, as JSON: the metrics that do not depend on
chance, or the error. Only what `import tinker` means differs between the clients.
"""

import asyncio
import faulthandler
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path

import chz
import tinker
from tinker_cookbook import checkpoint_utils, renderers
from tinker_cookbook.distillation import datasets as distilled
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as sft
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer

import tinker_sync
from tinker_sync.local import tiny

BASE, RENDERER = "tinker-sync/tiny", "role_colon"
register_tokenizer(BASE, partial(tinker_sync.get_tokenizer, BASE))


def renderer():
    return renderers.get_renderer(RENDERER, get_tokenizer(BASE))


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class Sums(SupervisedDataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def get_batch(self, index):
        answers = ["3", "7"] if self.pairs else ["3"]
        train_on = renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
        made = [chat(f"Q: {index}+2=", answer) for answer in answers]
        return [conversation_to_datum(each, renderer(), 64, train_on) for each in made]

    def __len__(self):
        return 3

    def set_epoch(self, seed=0):
        pass


@chz.chz
class SumsBuilder(SupervisedDatasetBuilder):
    pairs: bool = False

    def __call__(self):
        return Sums(self.pairs), None


class Sum(ProblemEnv):
    def get_question(self):
        return "1+2="

    def check_answer(self, sample_str):
        return len(sample_str) % 2 == 0

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "3"


class Turns(Env):
    """Three turns, each of which continues the tokens of the last one."""

    def __init__(self):
        self.tokens = [40, 41]

    async def initial_observation(self):
        return tinker.ModelInput.from_ints(self.tokens), ["\n"]

    async def step(self, action, *, extra=None):
        self.tokens += [*action, 42]
        done = self.tokens.count(42) > 2
        return StepResult(
            reward=float(len(action) % 2),
            episode_done=done,
            next_observation=tinker.ModelInput.from_ints(self.tokens),
            next_stop_condition=["\n"],
            metrics={},
        )


class TurnsGroup(EnvGroupBuilder):
    async def make_envs(self):
        return [Turns() for _ in range(3)]


class Problems(RLDataset):
    def __init__(self, turns):
        self.turns = turns

    def get_batch(self, index):
        if self.turns:
            return [TurnsGroup() for _ in range(2)]
        return [ProblemGroupBuilder(env_thunk=partial(Sum, renderer()), num_envs=3) for _ in range(2)]

    def __len__(self):
        return 3


@chz.chz
class ProblemsBuilder(RLDatasetBuilder):
    turns: bool = False

    async def __call__(self):
        return Problems(self.turns), None


def metrics(folder, *names):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for line in lines if name in line] for name in names]


# --------------------------------------------------------------------------------------------- the loops


def train_sft(folder, **options):
    config = {
        "log_path": folder, "model_name": BASE, "recipe_name": "sums", "renderer_name": RENDERER,
        "dataset_builder": SumsBuilder(), "learning_rate": 1e-2, "lora_rank": 4, "save_every": 1,
        "eval_every": 0,
    }  # fmt: skip
    asyncio.run(sft.main(sft.Config(**{**config, **options})))
    return metrics(folder, "train_mean_nll")


def supervised(folder):
    return train_sft(folder)


def resumed(folder):
    """Stop after two steps, and go on from the checkpoint."""
    train_sft(folder, max_steps=2)
    return train_sft(folder)


def train_rl(folder, **options):
    config = {
        "log_path": folder, "model_name": BASE, "recipe_name": "sums", "renderer_name": RENDERER,
        "dataset_builder": ProblemsBuilder(), "learning_rate": 1e-3, "lora_rank": 4, "max_tokens": 4,
        "save_every": 2, "eval_every": 0,
    }  # fmt: skip
    asyncio.run(rl.main(rl.Config(**{**config, **options})))
    return metrics(folder, "progress/batch")


def rl_sync(folder):
    return train_rl(folder, num_substeps=2, compute_post_kl=True)


def rl_async(folder):
    settings = rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=2)
    train_rl(folder, async_config=settings)
    return []


def rl_streamed(folder):
    return train_rl(
        folder, stream_minibatch_config=rl.StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)
    )


def rl_stable(folder):
    return train_rl(folder, loss_fn="stable_reinforce")


def rl_turns(folder):
    return train_rl(folder, dataset_builder=ProblemsBuilder(turns=True))


def rl_reference(folder):
    reference = rl.KLReferenceConfig(base_model=BASE)
    return train_rl(folder, kl_penalty_coef=0.1, kl_reference_config=reference)


def preferences(folder):
    train_dpo.main(
        train_dpo.Config(
            log_path=folder,
            model_name=BASE,
            recipe_name="sums",
            renderer_name=RENDERER,
            dataset_builder=SumsBuilder(pairs=True),
            learning_rate=1e-2,
            lora_rank=4,
            save_every=0,
            eval_every=0,
        )
    )
    return metrics(folder, "dpo_loss")


def distillation(folder):
    source = distilled.DistillationDatasetConfig(
        dataset_builder=ProblemsBuilder(),
        teacher_config=distilled.TeacherConfig(base_model=BASE),
        groups_per_batch=2,
    )
    config = train_on_policy.Config(
        log_path=folder, model_name=BASE, recipe_name="sums", renderer_name=RENDERER,
        dataset_configs=[source], learning_rate=1e-3, lora_rank=4, max_tokens=4, save_every=2, eval_every=0,
    )  # fmt: skip
    asyncio.run(train_on_policy.main(config))
    return metrics(folder, "progress/batch")


def weights(folder):
    """Find the checkpoints of a finished loop, and sample from one of them."""
    train_sft(folder)
    last = checkpoint_utils.get_last_checkpoint(folder)
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(model_path=last.sampler_path)
    params = tinker.SamplingParams(max_tokens=3, temperature=0.0)
    sampled = sampler.sample(tinker.ModelInput.from_ints([40, 41]), 1, params).result()
    listed = service.create_rest_client().list_checkpoints(last.state_path.split("/")[2]).result()
    return [len(sampled.sequences[0].tokens), len(listed.checkpoints)]


def merged(folder):
    """Export what a finished loop trained, and merge it into the base model."""
    from tinker_cookbook.weights import build_hf_model, download
    from transformers import AutoModelForCausalLM

    train_sft(folder)
    service = tinker.ServiceClient()
    last = checkpoint_utils.get_last_checkpoint(folder)
    training = service.create_training_client_from_state(last.state_path)
    exported = training.save_weights_external("exported").result().path
    adapter = download(tinker_path=exported, output_dir=str(Path(folder) / "adapter"))
    output = str(Path(folder) / "merged")
    build_hf_model(base_model=str(tiny.directory()), adapter_path=adapter, output_path=output)
    model = AutoModelForCausalLM.from_pretrained(output)
    return [[name, float(each.float().norm())] for name, each in model.named_parameters()]


LOOPS = {
    each.__name__: each
    for each in (
        supervised, resumed, rl_sync, rl_async, rl_streamed, rl_stable, rl_turns, rl_reference, preferences,
        distillation, weights, merged,
    )
}  # fmt: skip


def main():
    faulthandler.dump_traceback_later(280, exit=True)
    url, key, folder, *names = sys.argv[1:]
    os.environ.update(TINKER_BASE_URL=url, TINKER_API_KEY=key)
    found = {}
    for name in names or LOOPS:
        try:
            found[name] = LOOPS[name](str(Path(folder) / name))
        except BaseException as failure:  # noqa: BLE001  # the outcome of this loop
            traceback.print_exc()
            found[name] = f"{type(failure).__name__}: {failure}"
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
