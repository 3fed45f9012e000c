"""The blocks on Trainer and TRL in docs/your-model.md, run as they stand: two steps of SFTTrainer on a tiny model."""

import re
from pathlib import Path

import pytest
import torch

import sidestream
from tiny_model import save

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"


@pytest.mark.slow  # TRL takes ten seconds to import; `make trl` and CI run it
def test_sft_trainer_trains_the_channel_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "my-model")
    text = PAGE.read_text()
    (first,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import Trainer" in block]
    (second,) = [block for block in re.findall(r"```python no-run\n(.*?)```", text, re.DOTALL) if "trl" in block]
    names: dict = {"__name__": "__main__"}
    for block in (first, second):
        exec(compile(block, PAGE.name, "exec"), names)
    model, trainer = names["model"], names["trainer"]
    assert trainer.state.global_step == 2
    assert model.channel.film.projection.weight.abs().max() > 1e-6, "the channel has not trained"
    start = names["load_base"]("my-model").state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.lm.state_dict().items())
    # TRL's own loss on the first batch is the one the attached model gives with these goals, and no other.
    with torch.no_grad():
        model.channel.film.projection.weight.normal_(std=0.3)
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: value for name, value in batch.items() if name != "goal"}
    with torch.no_grad():
        said = trainer.compute_loss(names["trainer"].model, dict(batch))
        own, closed = model(**inputs, goal=batch["goal"]).loss, model(**inputs).loss
    torch.testing.assert_close(said.float(), own.float(), atol=1e-4, rtol=1e-4)
    assert (own - closed).abs() > 1e-4
    # Saved by TRL, resumed by TRL, evaluated by TRL.
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0
    trainer.save_model("sft/out")
    loaded = sidestream.load("sft/out")
    assert all(torch.equal(a, b) for a, b in zip(loaded.channel.parameters(), model.channel.parameters(), strict=True))
    # Without its goals a batch would train nothing, and says so.
    with pytest.raises(ValueError, match="came without goals"):
        trainer.model.train()
        trainer.compute_loss(trainer.model, dict(inputs))
