"""Watch the replicas of a model from inside the libraries that train it: Lightning, transformers, Accelerate.

    from syncheck.integrations.lightning import SyncCheckCallback      # lightning.Trainer(callbacks=[...])
    from syncheck.integrations.transformers import SyncCheckCallback   # transformers.Trainer(callbacks=[...])
    from syncheck.integrations.accelerate import monitor               # monitor(accelerator, model, optimizer)

Importing this package imports none of these libraries; docs/integrations.md has a recipe for each, and for plain loops.
"""
