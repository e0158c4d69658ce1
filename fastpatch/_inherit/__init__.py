"""What child processes of ``python -m fastpatch`` find first on their PYTHONPATH: ``sitecustomize``."""
