"""The reference trainer: each parallel method of PyTorch in a short file, one checkpoint per rank.

Read from the top: run.py is the command line. engine.py builds the objects of a run and loops over epochs and batches.
trainer.py makes one optimizer step, and calls a method in methods/; start with single.py. checkpoints/saver.py writes
the files. parts.py builds the data, the model and the optimizer, settings.py declares the options.

    launch/                start, rendezvous and end of processes, signals: torchrun, --spawn, by hand, SLURM
    models/ data/          networks; data sets, and training batches, optionally loaded by worker processes
    optional.py            imports of syncheck, without which the trainer writes no metadata blocks
    mesh.py                coordinates of a rank in the grid of a method
    schedule.py seeds.py   the plan of a run and its learning rates; random streams of ranks and samples
    checkpoints/           one file per rank: the end of the run, steps, and the best epoch
    resume/                states for a bitwise identical continuation
    task.py metrics.py     data, model, loss and metrics of a run; scores over all ranks
    recorders/             output of metrics: progress bar, logs, metrics file, TensorBoard
    sync_checks.py         --monitor: whether all ranks hold the same model
    result.py              the result of a run, and its summary
    faults/                injected faults
    evaluate/ bench/       separate programs: test scores of each rank's file; timing of the methods
"""
