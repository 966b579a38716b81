"""Time, memory and gradient error of reversible training, beside its alternatives.

A *workload* is a network and a batch; a *method* is a way to get its gradient. Every method runs the same branches with
the same parameters on the same input:

    workloads.py   what is run: the stages of hamiltonian-74, whole networks, an attention sequence, depths
    methods.py     by which way: plain.py (ordinary PyTorch), peers.py (other libraries), and revode itself
    cases.py       one workload by one method: a step, its gradient, the bytes it keeps
    measure.py     rows of interleaved repetitions; roofline.py: the bare convolutions of a step
    footprint.py   peak memory of a fresh process
    report.py      rows as text, figures and JSON
"""
