"""Check the replicas of a model from within Lightning, transformers and Accelerate.

    from syncheck.integrations.lightning import SyncCheckCallback      # lightning.Trainer(callbacks=[...])
    from syncheck.integrations.transformers import SyncCheckCallback   # transformers.Trainer(callbacks=[...])
    from syncheck.integrations.accelerate import monitor               # monitor(accelerator, model, optimizer)

Importing this package does not import these libraries; docs/integrations.md has a recipe for each library and for plain
training loops.
"""
