"""Requests to other servers: any vLLM that runs PicConnector."""
