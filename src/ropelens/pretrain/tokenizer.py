"""A tokenizer for pretraining: byte-level BPE, trained on the documents or loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropelens.data.sources import source_of
from ropelens.pretrain.folders import replace_folder

MOST = 100_000_000  # characters that a tokenizer is trained on
BETWEEN = "<|endoftext|>"


def tokenizer_for(
    name: str | os.PathLike[str] | None, source: Any, vocab_size: int, folder: Path, text_column: str
) -> Any:
    """Returns the tokenizer in a folder, putting it there first if need be.

    Args:
        name: A tokenizer that transformers loads; None to train a byte-level BPE on the documents.
        source: Documents, as `ropelens.windows` takes them.

    Raises:
        ValueError: If it has more tokens than the model.
    """
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").exists():
        made = (
            _trained(source, vocab_size, text_column) if name is None else AutoTokenizer.from_pretrained(name)
        )
        replace_folder(folder, made.save_pretrained)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"expected a tokenizer of at most {vocab_size:,} tokens, the model's vocabulary, got "
            f"{len(tokenizer):,}"
        )
    return tokenizer


def _trained(source: Any, vocab_size: int, text_column: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BETWEEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(source, text_column), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BETWEEN} $A", special_tokens=[(BETWEEN, bpe.token_to_id(BETWEEN))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BETWEEN, eos_token=BETWEEN)


def _texts(source: Any, text_column: str) -> Iterator[str]:
    documents, left = source_of(source, split="train", text_column=text_column), MOST
    for shard in range(documents.n_shards):
        for document in documents.rows(shard, 0):
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return
