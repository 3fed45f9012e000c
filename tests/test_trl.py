"""The block on TRL in docs/your-model.md, run as it stands: two steps of SFTTrainer on a tiny model."""

import re
from pathlib import Path

import pytest
import torch

from tiny_model import save

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"


@pytest.mark.slow  # TRL takes ten seconds to import; `make trl` and CI run it
def test_sft_trainer_trains_the_channel_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "my-model")
    found = [
        block for block in re.findall(r"```python no-run\n(.*?)```", PAGE.read_text(), re.DOTALL) if "trl" in block
    ]
    assert len(found) == 1
    names: dict = {"__name__": "__main__"}
    exec(compile(found[0], PAGE.name, "exec"), names)
    model, trainer = names["model"], names["trainer"]
    assert trainer.state.global_step == 2
    assert model.channel.film.projection.weight.abs().max() > 1e-4, "the channel has not trained"
    start = names["load_base"]("my-model").state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.lm.state_dict().items())
    # TRL's own loss on the first batch is the one the attached model gives with these goals, and no other.
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: value for name, value in batch.items() if name != "goal"}
    with torch.no_grad():
        said = trainer.compute_loss(names["trainer"].model, dict(batch))
        own, closed = model(**inputs, goal=batch["goal"]).loss, model(**inputs).loss
    torch.testing.assert_close(said.float(), own.float(), atol=1e-4, rtol=1e-4)
    assert (own - closed).abs() > 1e-4
