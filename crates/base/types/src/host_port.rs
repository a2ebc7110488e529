//! A host and a port as written on a command line and in a URL. Resolves no names.

use std::fmt;
use std::str::FromStr;

/// A host (name or address) and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// A name, an IPv4 address, or an IPv6 address without brackets.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
}

impl FromStr for HostPort {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let (host, port) = s.rsplit_once(':').ok_or_else(|| invalid_host_port(s, "there is no colon"))?;
        let port = match port.parse::<u16>() {
            Ok(0) | Err(_) => return Err(invalid_host_port(s, &format!("'{port}' is not a port from 1 to 65535"))),
            Ok(port) => port,
        };
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| invalid_host_port(s, "the bracket is not closed"))?,
            None if host.contains(':') => return Err(invalid_host_port(s, "an IPv6 address must stand in brackets")),
            None => host,
        };
        if host.is_empty() || host.chars().any(char::is_whitespace) {
            return Err(invalid_host_port(s, "the host is missing"));
        }
        Ok(HostPort { host: host.to_owned(), port })
    }
}

fn invalid_host_port(s: &str, why: &str) -> String {
    format!("'{s}' is not HOST:PORT: {why}; write node1:7000, 10.0.0.1:7000 or [::1]:7000")
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}
