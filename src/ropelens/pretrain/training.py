"""One training of a small Llama, on transformers' Trainer: exact when resumed, the same order for a seed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from ropelens.interventions import set_frequencies
from ropelens.pretrain.configs import PretrainConfig, config_of
from ropelens.pretrain.corpus import Corpus
from ropelens.pretrain.folders import replace_folder
from ropelens.pretrain.learned import NAME, learn_frequencies, take_learned
from ropelens.scores import saving

WHOLE = "whole.json"  # in a checkpoint that was written to its end
EVALUATIONS = 40


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        loss: Nats a token on the held-out blocks, in the end.
        curve: (tokens, held-out loss) from the first evaluation to the last.
        train: (tokens, training loss), each the mean since the one before.
        weights: Hash of the weights before the first step, frequencies aside.
        order: Hash of the blocks trained on and of their order.
        setting: Hash of all else that decides a training but its frequencies.
        tokens: Tokens trained on.
        seconds: Time taken, interruptions left out.
    """

    loss: float
    curve: list[list[float | int]]
    train: list[list[float | int]]
    weights: str
    order: str
    setting: str
    tokens: int
    seconds: float


def pretrain(
    config: str | PretrainConfig,
    corpus: Corpus,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    inv_freq: Float[Tensor, "layer band"] | None = None,
    learn: str | None = None,
    repeat: bool = False,
    checkpoints: int = 10,
    compile: bool = False,
    tokenizer: Any = None,
    progress: bool = True,
) -> Trained:
    """Trains a small Llama; interrupted, the same call goes on from the last checkpoint to the same end.

    The seed decides the initial weights and the order of the data, and nothing else does. AdamW, gradients
    clipped at norm 1, bfloat16 on a GPU that has it. `torchrun`'s processes share each batch, to the same
    end; a process trains on one GPU. With TensorBoard installed, losses are logged in `out/tensorboard`.

    Args:
        config: A configuration, or the name of one in `CONFIGS`.
        corpus: The blocks, of the configuration's context.
        out: Folder for `model/`, `result.json` and, until they lie there, checkpoints.
        inv_freq: Frequencies to train with; the original ladder by default.
        learn: "layer" or "shared": frequencies are parameters, for each layer or one row for all.
        repeat: Whether blocks may be trained on more than once, where there are too few.
        checkpoints: How many are written over the whole training.
        compile: Whether torch.compile makes the training step.
        tokenizer: Saved with the model.

    Raises:
        ValueError: If the corpus is of another length or too small, frequencies cannot be set, or `out`
            holds another training.

    Example:
        ```python
        windows = rl.windows("plays/*.txt", tokenizer, context=256, fit="pack")
        corpus = Corpus.of(windows, "run/data", blocks=15_600, held_out=128)
        pretrain("tiny-1m", corpus, "run/model", seed=0).loss
        ```
    """
    config, out = config_of(config), Path(out)
    require_enough(config, corpus, repeat)
    if learn not in (None, "layer", "shared"):
        raise ValueError(f'expected learn="layer" or "shared", got {learn!r}')
    if learn is not None and inv_freq is not None:
        raise ValueError("expected inv_freq or learn, not both: learned frequencies start at the ladder")
    ordered = Ordered(corpus, config, seed)
    setting = hashlib.sha256(json.dumps(config.facts, sort_keys=True).encode()).hexdigest()[:32]
    _require_the_same(
        out,
        {
            "setting": setting,
            "order": ordered.digest,
            "seed": seed,
            "inv_freq": None if inv_freq is None else inv_freq.double().tolist(),
            "learn": learn,
        },
    )
    result = out / "result.json"
    if result.exists():
        return Trained(**json.loads(result.read_text()))
    model = config.build(seed)
    weights = hash_of(model.state_dict())
    if inv_freq is not None:
        set_frequencies(model, inv_freq)
    if learn is not None:
        ladder = model.model.rotary_emb.inv_freq.double()
        learn_frequencies(model, ladder, shared=learn == "shared")
    args = on_one_gpu(_arguments(config, out, seed, checkpoints, compile, corpus.n_held_out))
    with _quiet():
        clock = Clock(out / "checkpoints")
        trainer = OrderedTrainer(
            model=model,
            args=args,
            train_dataset=ordered,
            eval_dataset=HeldOut(corpus),
            callbacks=[clock, *([Bar(out.name, config.batch * config.context)] if progress else [])],
        )
        trainer.remove_callback(PrinterCallback)
        last = last_checkpoint(out / "checkpoints")
        if trainer.is_world_process_zero() and (board := _board(out, last)) is not None:
            trainer.add_callback(board)
        clock.begin(last)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
        if evaluated[-1:] != [config.steps]:
            trainer.evaluate()
        history = trainer.state.log_history
    a_step = config.batch * config.context
    curve = [[h["step"] * a_step, h["eval_loss"]] for h in history if "eval_loss" in h]
    train = [[h["step"] * a_step, h["loss"]] for h in history if "loss" in h]
    found = Trained(
        loss=curve[-1][1],
        curve=curve,
        train=train,
        weights=weights,
        order=ordered.digest,
        setting=setting,
        tokens=config.steps * a_step,
        seconds=clock.seconds,
    )
    if trainer.is_world_process_zero():
        with _quiet():
            _finish(out, trainer, tokenizer)
        saving.write_bytes(result, json.dumps(asdict(found)).encode())
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return found


def require_enough(config: PretrainConfig, corpus: Corpus, repeat: bool) -> None:
    """Raises a ValueError unless the corpus fits the configuration, or may be repeated."""
    if corpus.context != config.context:
        raise ValueError(
            f"expected blocks of {config.context} tokens, the context of {config.name}, got {corpus.context}"
        )
    needed, there = config.steps * config.batch, corpus.n_blocks
    if needed > there and not repeat:
        raise ValueError(
            f"the data hold {there * config.context:,} tokens to train on, and the "
            f"{needed * config.context:,} asked for would take {needed / there:.1f} epochs of them: pass "
            "repeat=True (--repeat) to go on with that, or ask for fewer"
        )


def _require_the_same(out: Path, asked: dict[str, Any]) -> None:
    """Notes what a folder is for, or refuses it if it is for something else."""
    path = out / "asked.json"
    asked = saving.as_json(asked, "arguments")
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        saving.write_bytes(path, json.dumps(asked).encode())
        return
    known = json.loads(path.read_text())
    what = {"setting": "configuration", "order": "data, or order of them", "inv_freq": "frequencies"}
    for key, value in asked.items():
        if known.get(key) != value:
            raise ValueError(
                f"{out} holds a training with another {what.get(key, key)}: choose another folder"
            )


def hash_of(state: Mapping[str, Tensor]) -> str:
    """Returns a hash of a model's weights, those of learned frequencies left out."""
    digest = hashlib.sha256()
    for name in sorted(state):
        if not name.startswith(NAME):
            digest.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


class Ordered(Dataset):
    """The blocks of a training in the order in which they are taken."""

    def __init__(self, corpus: Corpus, config: PretrainConfig, seed: int) -> None:
        self.corpus = corpus
        self.order = corpus.order(config.steps * config.batch, seed)
        data = json.dumps(corpus.fingerprint, sort_keys=True).encode()
        self.digest = hashlib.sha256(self.order.astype("<i8").tobytes() + data).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.corpus.block(int(self.order[index]))
        return {"input_ids": ids, "labels": ids}


class HeldOut(Dataset):
    """The blocks that are held out."""

    def __init__(self, corpus: Corpus) -> None:
        self.ids = corpus.held_out()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class OrderedTrainer(Trainer):
    """A Trainer that takes its data as they come, and decays all weights but the embeddings."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        made = vars(self).get("optimizer")
        if made is None:
            made = self.optimizer = adamw(self.model if model is None else model, self.args)
        return made


def adamw(model: Any, args: Any) -> torch.optim.Optimizer:
    """Returns AdamW, with weight decay on all parameters but embeddings and learned frequencies."""
    free = (".embed_tokens.", ".lm_head.", f".{NAME}.")
    decayed: list[Any] = []
    others: list[Any] = []
    for name, parameter in model.named_parameters():
        (others if any(part in f".{name}" for part in free) else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, fused=args.device.type == "cuda")


class Clock(TrainerCallback):
    """Counts the seconds of a training over all its sessions, and marks checkpoints that are whole."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._before, self._start = folder, 0.0, time.monotonic()

    def begin(self, last: Path | None) -> None:
        self._start = time.monotonic()
        if last is not None:
            self._before = json.loads((last / WHOLE).read_text())["seconds"]

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            path = self.folder / f"checkpoint-{state.global_step}"
            saving.write_bytes(path / WHOLE, json.dumps({"seconds": self.seconds}).encode())


class Bar(TrainerCallback):
    """A bar that counts tokens, with the last losses."""

    def __init__(self, name: str, a_step: int) -> None:
        self.name, self.a_step = name, a_step
        self.losses: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        total, done = state.max_steps * self.a_step, state.global_step * self.a_step
        off = not state.is_world_process_zero
        self.bar = tqdm(total=total, initial=done, desc=self.name, unit="tok", unit_scale=True, disable=off)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.bar.update(state.global_step * self.a_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        names = {"loss": "loss", "eval_loss": "held out"}
        self.losses |= {names[k]: f"{v:.3f}" for k, v in (logs or {}).items() if k in names}
        self.bar.set_postfix(self.losses, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.bar.close()


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the newest checkpoint that was written to its end."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / WHOLE).exists()]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def _board(out: Path, last: Path | None) -> TrainerCallback | None:
    """What logs for TensorBoard, from a checkpoint on; None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    gone = None if last is None else step_of(last) + 1
    return TensorBoardCallback(SummaryWriter(str(out / "tensorboard"), purge_step=gone))


def _arguments(
    config: PretrainConfig, out: Path, seed: int, checkpoints: int, compile: bool, held_out: int
) -> TrainingArguments:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if config.batch % (config.micro_batch * world):
        raise ValueError(
            f"expected a batch of {config.batch} sequences to be whole micro-batches of "
            f"{config.micro_batch} for each of {world} processes"
        )
    evaluate = max(1, config.steps // EVALUATIONS)
    # At a multiple of the evaluations, so that no loss that was summed since the last one is lost.
    save = evaluate * max(1, round(config.steps / evaluate / checkpoints))
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=config.micro_batch,
        # A batch that is not whole would be filled up with blocks that are then counted twice.
        per_device_eval_batch_size=max(n for n in range(1, config.micro_batch + 1) if held_out % n == 0),
        gradient_accumulation_steps=config.batch // (config.micro_batch * world),
        learning_rate=config.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, round(config.warmup * config.steps)),
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        weight_decay=config.weight_decay,
        max_grad_norm=1.0,
        logging_steps=evaluate,
        eval_strategy="steps",
        eval_steps=evaluate,
        save_steps=save,
        save_total_limit=2,
        seed=seed,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        torch_compile=compile,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
    )


def on_one_gpu(args: TrainingArguments) -> TrainingArguments:
    """Keeps a Trainer without `torchrun` from taking a micro-batch a step for every GPU that it sees."""
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _finish(out: Path, trainer: Trainer, tokenizer: Any) -> None:
    """Saves the model as `ropelens.load` reads it."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    learned = take_learned(model)
    if learned is not None:
        from ropelens.hosts.base import CONFIG

        setattr(model.config, CONFIG, learned.tolist())

    def write(folder: str) -> None:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    replace_folder(out / "model", write)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' own reports and bars from the terminal; warnings stay."""
    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()
