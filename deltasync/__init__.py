"""deltasync: RL weights travel as the bits that changed, through a bucket, and are proven bit for bit.

    publisher = Publisher("file:///data/run")     # trainer
    publisher.publish(model.state_dict().items(), step=1)

    replica = Replica("file:///data/run")         # anywhere else
    replica.sync()
"""

from deltasync import errors
from deltasync.publisher import Publisher, Receipt
from deltasync.replica import Replica
from deltasync.stores import open_store

__version__ = "0.1.0"

__all__ = ["Publisher", "Receipt", "Replica", "__version__", "errors", "open_store"]
