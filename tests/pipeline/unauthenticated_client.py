"""A Spark client without the secret, and the processes that it connects to."""

from typing import Any

import psutil
from pyspark import SparkContext


def jvm_process(context: SparkContext) -> psutil.Process:
    assert context._gateway is not None
    response: psutil.Process = psutil.Process(context._gateway.proc.pid)
    return response


def ask_without_secret(context: SparkContext, port: int) -> str:
    """Return the response to a client without the secret that asks a Spark process whether it has an endpoint."""
    spark: Any = context._jvm.org.apache.spark
    conf = spark.SparkConf(False).set("spark.rpc.askTimeout", "20s").set("spark.rpc.lookupTimeout", "20s")
    reply = spark.SecurityManager
    defaults = (getattr(reply, f"$lessinit$greater$default${number}")() for number in (2, 3))
    client = spark.rpc.RpcEnv.create("stranger", "127.0.0.1", 0, conf, reply(conf, *defaults), True)
    try:
        address = spark.rpc.RpcAddress("127.0.0.1", port)
        return str(client.setupEndpointRef(address, "MapOutputTracker").toString())
    finally:
        client.shutdown()
