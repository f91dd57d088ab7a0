"""The reference trainer: each parallel method of PyTorch in a short file, saving one checkpoint per rank.

From the top: run.py, the command line, calls engine.py, the loop over epochs and batches; that calls step.py, one
optimizer step; and that calls one of methods/, of which single.py is to be read first. job.py builds what they work on,
settings.py and options.py define the settings of a run and its command-line options.

Where to look for the rest:

    launch/                how processes are started and meet, and how they end: torchrun, --spawn, by hand, SLURM
    models/ data/          networks and data sets; loading.py: batches, by processes that load ahead
    schedule.py seeds.py   the learning rate of each step; random streams for ranks and samples
    data_parallel.py sync_batchnorm.py comm_hooks.py compiling.py ema.py    what methods and steps are built with
    checkpoints/           one file per rank: of the end, of steps on the way, and of the best epoch
    resume/ position.py    states from which an interrupted run goes on with the same bits; how far it has come
    metrics.py scoring.py  loss and accuracy over all ranks, in training and on the test set
    recorders/             what becomes of a run's numbers: the bar, logs, metrics, TensorBoard
    stopping.py watch.py   a signal makes all ranks stop after the same step; checks while it trains
    faults/                planted desyncs, to see what they look like
    evaluate/ bench/       programs of their own: each rank's file on the test data; methods timed side by side
"""
