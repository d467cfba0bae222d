"""`python -m flaxzoo` is the command `flaxzoo`."""

from .train.cli.main import main

raise SystemExit(main())
