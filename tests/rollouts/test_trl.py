"""TRL's trainers over this engine: what it says a token's log-probability was is what the trainer computes."""

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
integration = pytest.importorskip("nanovllm.integrations.trl")

DEMO = str(Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3")
COMMON: dict[str, Any] = {
    "use_vllm": True, "vllm_mode": "colocate", "use_cpu": True, "bf16": False, "fp16": False, "learning_rate": 1e-3,
    "lr_scheduler_type": "constant", "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4,
    "max_completion_length": 12, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip

ROUNDING = 3e-5
"""Both compute in float32, each with its own order of sums: of the same texts, transformers' log-probabilities and ours
are up to 1.2e-5 and 0.7e-5 off those in float64."""


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("e")) - 0.1 * len(text) for text in completions]


def train(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer after its steps, and the checksums of the engine's weights at each sync, with the adapters that it has
    then. given: arguments of the trainer."""
    sums = []
    sync = integration.Generation.sync_weights

    def noted_sync(self: Any) -> None:
        sync(self)
        assert self.llm.config.enable_sleep == self.enable_sleep_mode
        sums.append({**self.llm.checksum(), "adapters": self.llm.engine.state.adapters})

    monkeypatch.setattr(integration.Generation, "sync_weights", noted_sync)
    integration.install(num_kvcache_blocks=64, max_num_batched_tokens=256)
    try:
        prompts = ["Once upon a time", "The capital of France is", "7 + 5 =", "A cat and a dog"]
        data = datasets.Dataset.from_dict({"prompt": prompts})
        args = getattr(trl, f"{kind}Config")(output_dir=str(folder), **{**COMMON, **options})
        trainer = getattr(trl, f"{kind}Trainer")(
            **{"model": DEMO, "reward_funcs": rewards, "args": args, "train_dataset": data, **(given or {})}
        )
        trainer.train()
        trainer.vllm_generation.llm.close()
    finally:
        integration.uninstall()
    return trainer, sums


@pytest.mark.parametrize(
    ("kind", "options"),
    [("GRPO", {}), ("GRPO", {"temperature": 0.7, "vllm_enable_sleep_mode": True}), ("RLOO", {})],
    ids=str,
)
def test_trainers_see_their_own_probabilities(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sums = train(kind, tmp_path, monkeypatch, **options)
    name = "sampling/sampling_logp_difference/max"
    differences = [line[name] for line in trainer.state.log_history if name in line]
    assert trainer.state.global_step == 4 and len(differences) == 4 * (kind == "GRPO")
    assert max(differences, default=0) < ROUNDING
    assert len({str(one) for one in sums}) == 4, "weights move"


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"vllm_enable_sleep_mode": True}], ids=str)
def test_of_a_policy_with_an_adapter_that_alone_is_sent(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a base that is the trainer's, which need not be the checkpoint's."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32")
    base.model.layers[0].mlp.down_proj.weight.data *= 0.5
    config = peft.LoraConfig(r=4, target_modules="all-linear", rank_pattern={"v_proj": 6}, use_rslora=True)
    given = {"model": base, "peft_config": config}
    del (common := {**COMMON})["model_init_kwargs"]
    monkeypatch.setitem(globals(), "COMMON", {**common, "learning_rate": 3e-2})
    trainer, sums = train("GRPO", tmp_path, monkeypatch, given, **options)
    name = "sampling/sampling_logp_difference/max"
    assert max(line[name] for line in trainer.state.log_history if name in line) < ROUNDING
    adapters = [one.pop("adapters") for one in sums]
    assert [list(one) for one in adapters] == [[f"policy@{number + 1}"] for number in range(len(sums))]
    assert len({one.digest for each in adapters for one in each.values()}) >= 4, "the policy moves"
    assert all(one == sums[0] for one in sums), "the base stays"


def test_adapters_that_are_not_served_can_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match=r"peft_config: use_dora=True.*enable_lora=False"):
        train("GRPO", tmp_path, monkeypatch, {"peft_config": config})


def test_what_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="vllm_mode='server'"):
        train("GRPO", tmp_path, monkeypatch, vllm_mode="server")
