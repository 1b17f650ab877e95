"""What runs on the far side of the fence: started as `python -S`, seen by the box as a read-only folder, imports the standard library only.

The host imports these modules too (frames, snapshots, encoded values, the filter), so both sides read one definition. Relative imports
only: inside, this folder is a top-level package.
"""
