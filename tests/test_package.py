def test_earlier_addresses_lead_to_what_moved():
    import importlib

    moved = {
        "lm.base.chat_template": "lm.models.base.chat_template",
        "lm.base.offsets": "lm.models.base.offsets",
        "lm.cache.CACHE_NAME": "lm.models.blocks.CACHE_NAME",
        "lm.cache.LatentCache": "lm.decoding.cache.LatentCache",
        "lm.cache.Window": "lm.decoding.window.Window",
        "papers.planning.table3": "papers.lsar.planning.table3",
        "papers.planning.Table3": "papers.lsar.planning.Planning",
    }

    def thing(address: str):
        module, _, name = address.rpartition(".")
        return getattr(importlib.import_module(f"sidestream.{module}"), name)

    for old, new in moved.items():
        assert thing(old) is thing(new)
    assert callable(thing("papers.planning_run.run_table3"))
