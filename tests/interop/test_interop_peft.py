"""Adapters in PEFT's format: what plait writes it reads back, PEFT computes the same with it, and vice versa."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.errors import PlaitError
from plait.interop.adapter_in import LoadedAdapter, read_adapter, with_adapter
from plait.interop.adapter_out import write_adapter
from plait.interop.base_model import BaseModel, read_base_model
from plait.interop.read_weights import load_model_from
from plait.model.adapter_shape import AdapterShape, AdapterTarget, AdapterVariant, SavedModule
from plait.model.adapters import merge_adapters
from plait.model.gpt import GPT
from plait.model.shape import linear_layers
from plait.model.weights import SAVED_TABLES, trained_weights
from tests.interop.random_models import SEQUENCE, VOCABULARY, random_config, random_model

TOKENS_BT = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")


def saved_base(folder: Path, seed: int) -> BaseModel:
    random_model(random_config(seed)).save_pretrained(folder)
    return read_base_model(folder)


def random_adapter(
    base: BaseModel,
    *,
    variant: AdapterVariant = "lora",
    targets: tuple[AdapterTarget, ...] = (),
    saved: tuple[SavedModule, ...] = (),
    rows: int = VOCABULARY,
) -> LoadedAdapter:
    shape = AdapterShape(
        rank=3, alpha=5.0, targets=targets or linear_layers(base.shape), variant=variant, modules_to_save=saved
    )
    whole = GPT(replace(base.shape, adapter=shape, vocabulary=rows))
    draw = torch.Generator().manual_seed(8)
    names = trained_weights(whole.shape)
    weights = {name: torch.randn(whole.get_parameter(name).shape, generator=draw) * 0.2 for name in names}
    return LoadedAdapter(shape=shape, weights=weights, base="fingerprint")


def written(folder: Path, base: BaseModel, adapter: LoadedAdapter) -> Path:
    folder.mkdir()
    write_adapter(
        folder,
        replace(base.shape, adapter=adapter.shape, vocabulary=rows_of(adapter)),
        base.family,
        adapter.weights.__getitem__,
        base=str(base.folder),
        fingerprint=adapter.base,
        dtype=torch.float32,
    )
    return folder


def rows_of(adapter: LoadedAdapter) -> int:
    tables = [adapter.weights[name] for name in SAVED_TABLES if name in adapter.weights]
    return len(tables[0]) if tables else VOCABULARY


def saved_llama(folder: Path, head: Literal["tied", "untied"]) -> tuple[BaseModel, Any]:
    config = random_config(1)
    config.tie_word_embeddings = head == "tied"
    random_model(config).save_pretrained(folder)
    return read_base_model(folder), config


def logits_of(model: GPT) -> Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS_BT))


@pytest.mark.parametrize("variant", ["lora", "rslora"])
@pytest.mark.parametrize("seed", range(5), ids=["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_what_was_written_is_read_back(tmp_path: Path, seed: int, variant: AdapterVariant) -> None:
    base = saved_base(tmp_path / "base", seed)
    adapter = random_adapter(base, variant=variant)
    found = read_adapter(written(tmp_path / "adapter", base, adapter), base.family, base.shape)
    assert found.base == "fingerprint" and found.weights.keys() == adapter.weights.keys()
    assert replace(found.shape, alpha=5.0) == adapter.shape and found.shape.alpha == pytest.approx(5.0)
    for name, weight in adapter.weights.items():
        assert torch.equal(found.weights[name], weight), name


def test_an_adapter_shares_the_bases_weights_and_is_what_merging_it_gives(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", 1)
    model = load_model_from(base, SEQUENCE, CPU)
    before = logits_of(model)
    one, other = (with_adapter(model, random_adapter(base, targets=t)) for t in ((), ("attention.v",)))
    assert one.get_parameter("norm.weight").data_ptr() == model.get_parameter("norm.weight").data_ptr()
    torch.testing.assert_close(logits_of(one), logits_of(merge_adapters(one)), rtol=0, atol=1e-4)
    assert not torch.allclose(logits_of(one), logits_of(other), atol=1e-2)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("targets", [("attention.q",), ("attention.q", "attention.v", "feedforward.down")])
def test_a_part_of_a_fused_module_is_filled_with_zeros(tmp_path: Path, targets: tuple[AdapterTarget, ...]) -> None:
    base = saved_base(tmp_path / "base", 0)
    adapter = random_adapter(base, targets=targets)
    found = read_adapter(written(tmp_path / "adapter", base, adapter), base.family, base.shape)
    model = load_model_from(base, SEQUENCE, CPU)
    wanted = logits_of(with_adapter(model, adapter))
    torch.testing.assert_close(logits_of(with_adapter(model, found)), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lora", "rslora"])
@pytest.mark.parametrize("seed", range(5), ids=["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_peft_computes_the_same_with_it(tmp_path: Path, seed: int, variant: AdapterVariant) -> None:
    peft = pytest.importorskip("peft")
    base = saved_base(tmp_path / "base", seed)
    adapter = random_adapter(base, variant=variant)
    folder = written(tmp_path / "adapter", base, adapter)
    theirs = peft.PeftModel.from_pretrained(random_model(random_config(seed)), folder).eval()
    own = load_model_from(base, SEQUENCE, CPU)
    wanted, plain = logits_of(with_adapter(own, adapter)), logits_of(own)
    with torch.no_grad():
        found = theirs(TOKENS_BT).logits.flatten(0, 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
    assert not torch.allclose(wanted, plain, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5), ids=["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_what_peft_wrote_is_read(tmp_path: Path, seed: int) -> None:
    peft = pytest.importorskip("peft")
    base = saved_base(tmp_path / "base", seed)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    theirs = peft.get_peft_model(random_model(random_config(seed)), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    found = read_adapter(tmp_path / "adapter", base.family, base.shape)
    assert found.shape.rank == 4 and found.shape.scale == 1.5
    with torch.no_grad():
        wanted = theirs(TOKENS_BT).logits.flatten(0, 1)
    own = logits_of(with_adapter(load_model_from(base, SEQUENCE, CPU), found))
    torch.testing.assert_close(own, wanted, rtol=0, atol=2e-4)


PATTERNS: dict[str, dict[str, Any]] = {
    "ranks": {"rank_pattern": {"v_proj": 2, "layers.1.self_attn.o_proj": 3}},
    "alphas": {"alpha_pattern": {"(q|k)_proj": 9, "layers.0.mlp.down_proj": 1}},
    "both, by roots": {
        "rank_pattern": {"k_proj": 3},
        "alpha_pattern": {"k_proj": 2, "up_proj": 30},
        "use_rslora": True,
    },
    "dora": {"use_dora": True, "rank_pattern": {"v_proj": 2}},
    "some layers": {
        "layers_to_transform": [0],
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "some modules of some layers": {"layers_to_transform": [0], "target_modules": ["q_proj", "down_proj"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("seed", [0, 1, 3], ids=["gpt2", "llama", "qwen2"])
def test_what_peft_wrote_with_patterns_is_read(tmp_path: Path, seed: int, name: str) -> None:
    peft = pytest.importorskip("peft")
    base = saved_base(tmp_path / "base", seed)
    options = {"target_modules": "all-linear", "init_lora_weights": False, **PATTERNS[name]}
    if seed == 0 and isinstance(options["target_modules"], list):
        options["target_modules"] = ["c_attn", "c_fc"]
    theirs = peft.get_peft_model(random_model(random_config(seed)), peft.LoraConfig(r=4, lora_alpha=6, **options))
    for key, weight in theirs.named_parameters():
        if "magnitude" in key:  # else each row would keep the length that it has
            weight.data *= torch.linspace(0.5, 1.5, len(weight.flatten())).view(weight.shape)
    theirs.eval().save_pretrained(tmp_path / "adapter")
    found = read_adapter(tmp_path / "adapter", base.family, base.shape)
    with torch.no_grad():
        wanted = theirs(TOKENS_BT).logits.flatten(0, 1)
    model = load_model_from(base, SEQUENCE, CPU)
    torch.testing.assert_close(logits_of(with_adapter(model, found)), wanted, rtol=0, atol=2e-4)
    merged = with_adapter(model, found)
    merged = merged if found.magnitudes else merge_adapters(merged)
    torch.testing.assert_close(logits_of(merged), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("key", "factor"), [("self_attn.q_proj", 5.0), ("layers.0.self_attn.q_proj", 2.0)])
def test_a_module_with_an_alpha_of_its_own_has_a_larger_b(
    tmp_path: Path, llama: BaseModel, key: str, factor: float
) -> None:
    adapter = random_adapter(llama)
    folder = written(tmp_path / "adapter", llama, adapter)
    config(alpha_pattern={key: 5.0 * factor})(folder)
    found = read_adapter(folder, llama.family, llama.shape)
    times = {name: found.shape.scale * found.weights[name] for name in found.weights if name.endswith("lora_b")}
    for name, weight in times.items():
        own = "attention.q." in name and (key.startswith("self") or name.startswith("layers.0."))
        wanted = adapter.shape.scale * (factor if own else 1.0) * adapter.weights[name]
        torch.testing.assert_close(weight, wanted)


TABLES: dict[str, tuple[Literal["tied", "untied"], tuple[SavedModule, ...]]] = {
    "both": ("untied", ("embedding", "head")),
    "embedding": ("untied", ("embedding",)),
    "head": ("untied", ("head",)),
    "tied": ("tied", ("embedding",)),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_were_trained_whole_are_written_and_read_back(tmp_path: Path, name: str) -> None:
    head, saved = TABLES[name]
    base, _ = saved_llama(tmp_path / "base", head)
    rows = VOCABULARY + (3 if name in ("both", "tied") else 0)
    adapter = random_adapter(base, saved=saved, rows=rows)
    found = read_adapter(written(tmp_path / "adapter", base, adapter), base.family, base.shape)
    assert found.shape.modules_to_save == saved and not found.unties
    assert found.weights.keys() == adapter.weights.keys()
    assert all(torch.equal(found.weights[name], weight) for name, weight in adapter.weights.items())
    model = load_model_from(base, SEQUENCE, CPU)
    before = logits_of(model)
    changed = with_adapter(model, found)
    assert changed.shape.vocabulary == rows and logits_of(changed).shape[-1] == rows
    assert changed.get_parameter("norm.weight").data_ptr() == model.get_parameter("norm.weight").data_ptr()
    torch.testing.assert_close(logits_of(merge_adapters(changed)), logits_of(changed), rtol=0, atol=1e-4)
    assert torch.equal(logits_of(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("grown", [0, 3])
@pytest.mark.parametrize("name", TABLES)
def test_peft_computes_the_same_with_whole_tables(tmp_path: Path, name: str, grown: int) -> None:
    peft = pytest.importorskip("peft")
    head, saved = TABLES[name]
    if grown and name in ("embedding", "head"):
        pytest.skip("new rows need both tables")
    base, config = saved_llama(tmp_path / "base", head)
    adapter = random_adapter(base, saved=saved, rows=VOCABULARY + grown)
    folder = written(tmp_path / "adapter", base, adapter)
    plain = random_model(config)
    plain.resize_token_embeddings(VOCABULARY + grown)
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    tokens = TOKENS_BT + grown
    with torch.no_grad():
        found = theirs(tokens).logits.flatten(0, 1)
        own = with_adapter(load_model_from(base, SEQUENCE, CPU), adapter)
        torch.testing.assert_close(found, own.logits(own(tokens)), rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ensure", [False, True])
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_whole_tables_that_peft_trained_are_read(
    tmp_path: Path, head: Literal["tied", "untied"], modules: list[str], ensure: bool
) -> None:
    peft = pytest.importorskip("peft")
    base, config = saved_llama(tmp_path / "base", head)
    options = {"target_modules": "all-linear", "init_lora_weights": False, "modules_to_save": list(modules)}
    if head == "tied":
        options["ensure_weight_tying"] = ensure
    theirs = peft.get_peft_model(random_model(config), peft.LoraConfig(r=4, lora_alpha=6, **options))
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.1)
        theirs.eval().save_pretrained(tmp_path / "adapter")
        wanted = theirs(TOKENS_BT).logits.flatten(0, 1)
    found = read_adapter(tmp_path / "adapter", base.family, base.shape)
    assert found.unties == (head == "tied" and not ensure)
    model = with_adapter(load_model_from(base, SEQUENCE, CPU), found)
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=2e-4)
    torch.testing.assert_close(logits_of(merge_adapters(model)), wanted, rtol=0, atol=2e-4)


Break = Callable[[Path], None]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def config(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file)

    return rewrite


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


CASES: dict[str, tuple[Break, str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "there is no adapter_config.json in"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "there is no adapter_model.safeten"),
    "a config that is no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{") and None,
        "not usable",
    ),
    "another kind": (config(peft_type="IA3"), "is of the kind IA3; plait reads only LORA adapters"),
    "dora": (config(use_dora=True), "lacks .*lora_magnitude_vector; bring the whole file"),
    "a magnitude without dora": (
        tensors(lambda found: found.update({f"{FIRST}.lora_magnitude_vector": torch.ones(4)})),
        r"is of another base: it has .*lora_magnitude_vector",
    ),
    "weights that PEFT changed": (
        config(init_lora_weights="pissa_niter_4"),
        "init_lora_weights in .* is 'pissa_niter_4'.*convert it to plain LoRA with PEFT's path_initial_model_for_weig",
    ),
    "invoked by tokens": (config(alora_invocation_tokens=[5, 6]), r"alora_invocation_tokens in .* is \[5, 6\], which"),
    "layers twice": (
        config(layer_replication=[[0, 1], [0, 1]]),
        "layer_replication in .* which plait does not compute",
    ),
    "groups of inputs": (config(use_qalora=True), "use_qalora in .* is True, which plait does not compute"),
    "a kind yet to come": (config(newer_config={"a": 1}), "newer_config in .* which plait does not compute"),
    "a pattern that is none": (config(alpha_pattern={"(": 1}), "has a key that is not a regular expression"),
    "no alpha in the pattern": (
        config(alpha_pattern={".*": 0}),
        "alpha_pattern in .* is 0; it should be a number above",
    ),
    "biases": (config(bias="all"), "bias in .* is all, which plait does not compute"),
    "a table that is missing": (config(modules_to_save=["lm_head"]), "lacks lm_head, which modules_to_save names"),
    "another whole module": (
        config(modules_to_save=["norm"]),
        "modules_to_save in .* has 'norm', and plait reads embed_tokens and lm_head alone",
    ),
    "a table of another width": (
        tensors(lambda found: found.update({"base_model.model.lm_head.weight": torch.zeros(61, 999)})),
        r"is of another base: its lm_head has the shape \[61, 999\], and this model asks for",
    ),
    "a table with too few rows": (
        tensors(lambda found: found.update({"base_model.model.model.embed_tokens.weight": torch.zeros(9, 24)})),
        r"is of another base: its model.embed_tokens has the shape \[9, 24\], and this model asks for \[61, 24\]",
    ),
    "no rank": (config(r=0), "r in .* is 0; it should be a whole number above 0"),
    "no alpha": (config(lora_alpha="much"), "lora_alpha in .* is 'much'; it should be a number above 0"),
    "a file that is cut off": (cut, "is damaged"),
    "no tensor": (tensors(lambda found: found.clear()), "is empty: the adapter was saved without its weights"),
    "half of a module": (tensors(lambda found: found.pop(f"{FIRST}.lora_B.weight")), "lacks base_model.*q_proj.lora_B"),
    "one layer without": (
        tensors(lambda found: [found.pop(f"{FIRST}.lora_{letter}.weight") for letter in "AB"]),
        "adapts other linear layers in some layers than in others",
    ),
    "a layer too many": (
        tensors(lambda found: found.update({f"{FIRST.replace('.0.', '.7.')}.lora_A.weight": torch.zeros(3, 4)})),
        r"is of another base: it has .*layers\.7\..*and no such linear layer is among the \d layers",
    ),
    "an empty shard": (
        tensors(lambda found: found.update({f"{FIRST}.lora_A.weight": torch.zeros(0)})),
        "which cannot be an adapter's: was it saved from one of several ranks",
    ),
    "a number in place of a matrix": (
        tensors(lambda found: found.update({f"{FIRST}.lora_B.weight": torch.ones(())})),
        "which cannot be an adapter's",
    ),
    "another width": (
        tensors(lambda found: found.update({f"{FIRST}.lora_A.weight": torch.zeros(3, 999)})),
        r"is of another base: its layers\.0\.attention\.q\.lora_a has the shape \[3, 999\], and this model asks for",
    ),
    "another rank": (
        tensors(
            lambda found: found.update(
                {f"{FIRST}.lora_A.weight": torch.ones(4, 4), f"{FIRST}.lora_B.weight": torch.ones(4, 4)}
            )
        ),
        r"has the rank 4, and adapter_config.json says 3 \(r, rank_pattern\)",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return saved_base(tmp_path_factory.mktemp("llama"), 1)


@pytest.mark.parametrize(
    "pattern", [{".*_proj": 9, "q_proj": 1}, {"proj": 1, r"model\..*": 9}, {".+": 9.0}, {"layers.[01].*": 9, ".*": 9}]
)
def test_alphas_are_found_as_peft_finds_them(tmp_path: Path, llama: BaseModel, pattern: dict[str, float]) -> None:
    """The first key, in order, that matches the end of a module's whole name."""
    folder = written(tmp_path / "adapter", llama, random_adapter(llama))
    config(alpha_pattern=pattern)(folder)
    assert read_adapter(folder, llama.family, llama.shape).shape.alpha == 9


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "orthogonal", "eva", "mica"])
def test_what_peft_writes_of_plain_lora_is_read(tmp_path: Path, llama: BaseModel, start: object) -> None:
    """Every key of its LoraConfig, with the value that leaves it off."""
    peft = pytest.importorskip("peft")
    folder = written(tmp_path / "adapter", llama, random_adapter(llama))
    values = peft.LoraConfig(lora_alpha=5, r=3, peft_type="LORA").to_dict()
    config(**{key: value for key, value in values.items() if key not in ("target_modules", "peft_type")})(folder)
    config(init_lora_weights=start, peft_version="0.99.0", eva_config={"rho": 2.0}, auto_mapping={"a": "b"})(folder)
    assert read_adapter(folder, llama.family, llama.shape).shape.alpha == pytest.approx(5.0)


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_that_does_not_fit_is_one_sentence(tmp_path: Path, llama: BaseModel, name: str) -> None:
    damage, words = CASES[name]
    folder = written(tmp_path / "adapter", llama, random_adapter(llama))
    damage(folder)
    with pytest.raises(PlaitError, match=words) as caught:
        read_adapter(folder, llama.family, llama.shape)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
