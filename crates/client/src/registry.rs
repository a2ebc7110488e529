//! Where the nodes of a group are written down. Only the static list is read in this version; the other
//! kinds parse, so that the answer to them is a sentence and not a syntax error.

use spurline_types::{Error, ErrorKind, Result};

/// A parsed `--registry` URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registry {
    /// `static:host:port[,host:port…]`
    Static(Vec<String>),
}

impl Registry {
    /// Reads a registry URL.
    ///
    /// # Errors
    /// `Invalid` for words that are no registry, `Unsupported` for kinds this version does not read.
    pub fn parse(url: &str) -> Result<Registry> {
        let invalid = |why: String| Error::new(ErrorKind::Invalid, format!("--registry {url}: {why}"));
        if let Some(list) = url.strip_prefix("static:") {
            let nodes: Vec<String> =
                list.split(',').map(str::trim).filter(|n| !n.is_empty()).map(String::from).collect();
            if nodes.is_empty() {
                return Err(invalid("no node is named; write static:host:port[,host:port]".into()));
            }
            for node in &nodes {
                let port = node.rsplit_once(':').map(|(_, port)| port);
                if !port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0)) {
                    return Err(invalid(format!("'{node}' names no port; write host:port, or [v6-address]:port")));
                }
            }
            return Ok(Registry::Static(nodes));
        }
        for known in ["dns:", "coordinator://", "etcd://"] {
            if url.starts_with(known) {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "--registry {url}: this version knows only static:host:port[,host:port]; {known} comes with cache groups"
                    ),
                ));
            }
        }
        Err(invalid("unknown kind; write static:host:port[,host:port]".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_lists() {
        assert_eq!(
            Registry::parse("static:a:1,[::1]:2").unwrap(),
            Registry::Static(vec!["a:1".into(), "[::1]:2".into()])
        );
        for (url, kind, words) in [
            ("static:", ErrorKind::Invalid, "no node is named"),
            ("static:host", ErrorKind::Invalid, "names no port"),
            ("static:host:0", ErrorKind::Invalid, "names no port"),
            ("etcd://h:2379", ErrorKind::Unsupported, "only static"),
            ("zookeeper:h", ErrorKind::Invalid, "unknown kind"),
        ] {
            let error = Registry::parse(url).unwrap_err();
            assert_eq!(error.kind(), kind, "{url}");
            assert!(error.message().contains(words), "{error}");
        }
    }
}
