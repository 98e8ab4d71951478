"""Training of the attention-only teaching models: one and two layers, on prose and repeated prose.

The models are Qwen2, which is Llama with biases on queries, keys and values, in transformers, with an MLP
whose output matrix is zero and stays so: what is left is attention, the residual stream and its norms.
Query and key biases let a head look at the token before whatever the tokens are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors.torch import load_file, save_file
from torch import Tensor

from ropelens.data import windows

HELD_OUT = 12  # every so many documents, one is kept for measuring


@dataclass(frozen=True)
class Recipe:
    """All that a teaching model depends on.

    Attributes:
        n_vocab: Tokens of the byte-level BPE, trained on the training documents; 0 is BOS, 1 stands for
            bytes that they do not have.
        context: Tokens in a row, the BOS at its start included.
        rows: Rows in a batch.
        repeated_rows: How many of them repeat their first tokens to the end of the row; all are prose.
        periods: How many tokens: at least, at most.
        bias_range: Standard deviation of the biases of queries and keys at the start.
        bias_rate: Their learning rate, the others' being `learning_rate`.
        kept: At which steps a checkpoint is kept: (up to which step, every how many).
        saved: Every so many steps, all that it takes to go on is saved.
    """

    n_layers: int
    d_model: int = 128
    n_heads: int = 2
    n_vocab: int = 512
    rope_theta: float = 1000.0
    context: int = 256
    rows: int = 8
    repeated_rows: int = 4
    periods: tuple[int, int] = (8, 64)
    steps: int = 3000
    learning_rate: float = 3e-3
    bias_rate: float = 2e-2
    bias_range: float = 0.3
    warmup: int = 100
    initializer_range: float = 0.08
    seed: int = 0
    kept: tuple[tuple[int, int], ...] = ((200, 20), (10**9, 50))
    saved: int = 200

    @property
    def repeated_share(self) -> float:
        """Share of the training tokens that lie in rows of repeats."""
        return self.repeated_rows / self.rows

    def keeps(self, step: int) -> bool:
        every = next(every for end, every in self.kept if step <= end)
        return step % every == 0 or step == self.steps


TWO_LAYERS = Recipe(n_layers=2)
TEACHING_MODELS = {"attn-only-1l": replace(TWO_LAYERS, n_layers=1), "attn-only-2l": TWO_LAYERS}


class Rows(torch.utils.data.Dataset):
    """The training rows in the order of training: row i depends on the seed and i alone.

    Prose is read in an order of its own, once before any is read again.
    """

    def __init__(self, recipe: Recipe, prose: Int64[Tensor, "window pos"]) -> None:
        self.recipe, self.prose = recipe, prose
        self.order = torch.randperm(len(prose), generator=torch.Generator().manual_seed(recipe.seed))

    def __len__(self) -> int:
        return self.recipe.steps * self.recipe.rows

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = self.prose[self.order[i % len(self.prose)]]
        if i % self.recipe.rows < self.recipe.repeated_rows:
            ids = repeated(ids, self.recipe.periods, seed=self.recipe.seed * 1_000_003 + i)
        return {"input_ids": ids, "labels": ids}


def repeated(ids: Int64[Tensor, " pos"], periods: tuple[int, int], seed: int) -> Int64[Tensor, " pos"]:
    """Returns the BOS and the first tokens after it, over and over to the end; their number is random."""
    # a generator's neighbouring seeds are not independent at once; a large odd factor parts them
    random = torch.Generator().manual_seed(seed * 2_654_435_761 % 2**40)
    period = int(torch.randint(periods[0], periods[1] + 1, (), generator=random))
    n = len(ids) - 1
    return torch.cat([ids[:1], ids[1 : 1 + period].repeat(-(-n // period))[:n]])


def split_documents(corpora: str | Path) -> tuple[list[Path], list[Path]]:
    """Returns the .txt files below a folder as (training, held out).

    Raises:
        ValueError: If there are too few.
    """
    files = sorted(Path(corpora).rglob("*.txt"), key=lambda path: path.relative_to(corpora).as_posix())
    if len(files) < 2:
        raise ValueError(f"expected a folder with documents (.txt) in {corpora}: run `make corpora` first")
    held_out = files[HELD_OUT // 2 :: HELD_OUT] or files[-1:]
    return [path for path in files if path not in held_out], held_out


def make_tokenizer(documents: Sequence[Path], n_vocab: int) -> Any:
    """Returns a byte-level BPE tokenizer of the documents that puts BOS before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bos, unknown = "<|bos|>", "<|unknown|>"
    bpe = Tokenizer(models.BPE(unk_token=unknown))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[bos, unknown],
        limit_alphabet=n_vocab // 4,
        show_progress=False,
    )
    bpe.train([str(path) for path in documents], trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=bos, unk_token=unknown, clean_up_tokenization_spaces=False
    )


def make_model(recipe: Recipe) -> Any:
    """Returns an untrained attention-only model: in transformers, with an MLP that adds nothing."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

    config = Qwen2Config(
        vocab_size=recipe.n_vocab,
        hidden_size=recipe.d_model,
        intermediate_size=1,
        num_hidden_layers=recipe.n_layers,
        num_attention_heads=recipe.n_heads,
        num_key_value_heads=recipe.n_heads,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=False,
        initializer_range=recipe.initializer_range,
        bos_token_id=0,
        eos_token_id=None,
        use_cache=False,
    )
    set_seed(recipe.seed)
    model: Any = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        for weight in layer.mlp.parameters():
            torch.nn.init.zeros_(weight).requires_grad_(False)
        layer.post_attention_layernorm.weight.requires_grad_(False)
        layer.self_attn.v_proj.bias.requires_grad_(False)  # zero: no head writes what it has not read
        for bias in (layer.self_attn.q_proj.bias, layer.self_attn.k_proj.bias):
            torch.nn.init.normal_(bias, std=recipe.bias_range)
    return model


def prose_windows(documents: Sequence[Path], tokenizer: Any, context: int) -> Int64[Tensor, "window pos"]:
    """Returns the documents as windows, each after a BOS."""
    stream = windows(list(documents), tokenizer, context=context, fit="split")
    return torch.stack([window.ids for window in stream])


def train_teaching_model(recipe: Recipe, corpora: str | Path, out: str | Path) -> Path:
    """Trains a teaching model, or goes on where an earlier run of the same recipe stopped.

    Args:
        corpora: A folder of .txt files, such as `make corpora` fetches.
        out: For `checkpoints/<step>` (models that transformers reads, at the steps that the recipe
            keeps), `tokenizer`, and the Trainer's own state.

    Returns:
        The folder of the trained model, which `rl.load` reads.

    Raises:
        ValueError: If there are no documents.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from ropelens.pretrain.training import on_one_gpu

    out = Path(out)
    documents, _ = split_documents(corpora)
    tokenizer = tokenizer_in(out / "tokenizer", documents, recipe.n_vocab)
    model = make_model(recipe)
    checkpoints = out / "checkpoints"

    class Keep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                _save(model, tokenizer, checkpoints / "0")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if recipe.keeps(state.global_step):
                _save(model, tokenizer, checkpoints / str(state.global_step))

    state = out / "state"
    arguments = TrainingArguments(
        output_dir=str(state),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.rows,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=recipe.warmup,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        save_steps=recipe.saved,
        save_total_limit=2,
        logging_steps=50,
        report_to="none",
        seed=recipe.seed,
        dataloader_num_workers=0,
    )
    trainer = Trainer(
        model=model,
        args=on_one_gpu(arguments),
        train_dataset=Rows(recipe, _prose(out / "prose.safetensors", documents, tokenizer, recipe.context)),
        callbacks=[Keep()],
        optimizers=(_optimizer(model, recipe), None),
    )
    last = get_last_checkpoint(str(state)) if state.exists() else None
    trainer.train(resume_from_checkpoint=last)
    return checkpoints / str(recipe.steps)


def _optimizer(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.01},
            {
                "params": [p for name, p in named if name.endswith("bias")],
                "weight_decay": 0.0,
                "lr": recipe.bias_rate,
            },
        ],
        lr=recipe.learning_rate,
    )


def tokenizer_in(folder: Path, documents: Sequence[Path], n_vocab: int) -> Any:
    """Returns the tokenizer that lies in a folder, trained and put there where there is none."""
    from transformers import PreTrainedTokenizerFast

    if not folder.exists():
        _whole(folder, lambda unfinished: make_tokenizer(documents, n_vocab).save_pretrained(unfinished))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _prose(
    file: Path, documents: Sequence[Path], tokenizer: Any, context: int
) -> Int64[Tensor, "window pos"]:
    """Returns the windows that lie in a file, made and put there where there is none."""
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        save_file({"ids": prose_windows(documents, tokenizer, context)}, unfinished)
        os.replace(unfinished, file)
    return load_file(file)["ids"]


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    def write(unfinished: Path) -> None:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)

    _whole(folder, write)


def _whole(folder: Path, write: Any) -> None:
    """Writes a folder whole, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write(unfinished)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(unfinished, folder)
