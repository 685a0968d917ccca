"""Own network, own loss and own data over three methods, in six lines of Python.

The same on the command line:

    pfl-ext compare fedavg ditto scd --network own/net.py:Net --task own/net.py:Huber --task-delta 0.5 \\
        --data own/net.py:load --partition iid --clients 5 --rounds 5 --lr 0.1
"""

from own.net import Huber, Net, load

import pfl_ext

clients = {"partition": "iid", "clients": 5}
found = pfl_ext.compare(
    ["fedavg", "ditto", "scd"], network=Net, task=Huber(delta=0.5), data=load, **clients, rounds=5, lr=0.1
)
print(found)
print(found["ditto"].personal_model(3))
