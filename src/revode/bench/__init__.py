"""Time, memory and gradient error of reversible training, beside its alternatives.

A *workload* is a network and a batch; a *method* is a way to get its gradient. Every method runs the same branches with
the same parameters on the same input:

    workloads.py   what is run: the stages of hamiltonian-74, whole networks, an attention sequence, depths, tiny branches
    methods.py     by which way: ordinary PyTorch, other libraries, and revode itself
    cases.py       one workload by one method: a step, its gradient, what it keeps and calls
    measure.py     rows of interleaved repetitions
    fresh.py       what needs a process of its own: peak memory, and the waits of a device
    report.py      rows as text, figures and JSON
"""
