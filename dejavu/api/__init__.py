"""The HTTP interface that clients of OpenAI's API know. Owns paths, fields, status codes and streams; decides nothing
about requests on their way, which are the service's."""
