"""The library without a host: parsers on captured output, shell texts really run, decisions."""
