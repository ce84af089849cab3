"""The programs of the demo's children, imported once in the process that the children are forked from."""

from fl_common.certificates.tls_version import set_oldest_tls

set_oldest_tls("1.3")  # grpc reads it when it is imported

import fl_client.app  # noqa: E402, F401
import fl_server.app  # noqa: E402, F401
