"""Live checks for training libraries: Lightning, transformers, Accelerate.

    from syncheck.integrations.lightning import SyncCheckCallback      # lightning.Trainer(callbacks=[...])
    from syncheck.integrations.transformers import SyncCheckCallback   # transformers.Trainer(callbacks=[...])
    from syncheck.integrations.accelerate import monitor               # monitor(accelerator, model, optimizer)

Importing this package does not import the libraries. docs/integrations.md has recipes for each library and for plain
loops.
"""
