"""AGCLR's tables: `methods.py` every method and ablations, `controls.py` latents replaced, `retention.py` what is kept.

`settings.py` has arms, tasks and scales, `work.py` the training that all of them share.
"""
