//! Registry URLs: where the nodes of a group are found. The same text works in every command.

use spurline_types::HostPort;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Where the cache nodes of a group are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistryUrl {
    /// A list of nodes.
    Static(Vec<HostPort>),
    /// A name that resolves to all nodes.
    Dns(DnsName),
    /// The embedded coordinator.
    Coordinator(HostPort),
    /// etcd.
    Etcd(EtcdUrl),
}

/// A DNS name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsName {
    /// The name; a name of SRV records begins with an underscore.
    pub name: String,
    /// The port of every node; `None` where SRV records contain the port.
    pub port: Option<u16>,
    /// The DNS server; `None` for the servers of this machine.
    pub server: Option<SocketAddr>,
}

/// etcd servers and credentials. Contains no password: that is in a file or in the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUrl {
    /// The servers, never empty.
    pub nodes: Vec<HostPort>,
    /// Certificate of the authority that signed the servers' certificates; enables TLS.
    pub ca: Option<PathBuf>,
    /// Client certificate.
    pub cert: Option<PathBuf>,
    /// The key.
    pub key: Option<PathBuf>,
    /// The user.
    pub user: Option<String>,
    /// A file with the password.
    pub password_file: Option<PathBuf>,
}

impl RegistryUrl {
    /// Whether nodes register themselves there.
    pub fn takes_registrations(&self) -> bool {
        matches!(self, RegistryUrl::Coordinator(_) | RegistryUrl::Etcd(_))
    }
}

const REGISTRY_FORMS: &str = "static:HOST:PORT[,…], dns:NAME:PORT, coordinator://HOST:PORT or etcd://HOST:PORT[,…]";

fn parse_hosts(text: &str) -> Result<Vec<HostPort>, String> {
    text.split(',').map(str::parse).collect()
}

/// `KEY=VALUE&…`, each key from `known`.
fn parse_options<'a>(text: &'a str, known: &[&str]) -> Result<Vec<(&'a str, &'a str)>, String> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| match pair.split_once('=') {
            Some((key, value)) if known.contains(&key) && !value.is_empty() => Ok((key, value)),
            _ => Err(format!("'{pair}' is no option here; the options are {}", known.join(", "))),
        })
        .collect()
}

fn parse_dns(text: &str) -> Result<DnsName, String> {
    let (place, more) = text.split_once('?').unwrap_or((text, ""));
    let mut server = None;
    for (_, value) in parse_options(more, &["server"])? {
        server = Some(value.parse().map_err(|_| format!("server={value} is no IP:PORT"))?);
    }
    if place.starts_with('_') {
        if place.contains(':') {
            return Err(format!("'{place}': SRV records contain the ports; leave the port out"));
        }
        return Ok(DnsName { name: place.to_owned(), port: None, server });
    }
    let HostPort { host, port } = place.parse()?;
    if host.parse::<std::net::IpAddr>().is_ok() {
        return Err(format!("'{host}' is an address, not a name; write static:{place}"));
    }
    Ok(DnsName { name: host, port: Some(port), server })
}

/// A single host: several coordinators would have no common list.
fn parse_coordinator(text: &str) -> Result<HostPort, String> {
    match text.split_once(',') {
        Some((first, _)) => Err(format!(
            "'{text}' names several coordinators, which share no list of nodes: give one, coordinator://{first}, or use \
             etcd://HOST:PORT[,…], whose servers replace each other"
        )),
        None => text.parse(),
    }
}

fn parse_etcd(text: &str) -> Result<EtcdUrl, String> {
    let (place, more) = text.split_once('?').unwrap_or((text, ""));
    if place.contains('@') {
        return Err(format!(
            "every user of this machine can see a password on the command line; write \
             etcd://{}?user=NAME&password-file=FILE, or set SPURLINE_ETCD_PASSWORD",
            place.rsplit('@').next().unwrap_or_default()
        ));
    }
    let nodes = parse_hosts(place.trim_end_matches('/'))?;
    let mut url = EtcdUrl { nodes, ca: None, cert: None, key: None, user: None, password_file: None };
    for (key, value) in parse_options(more, &["ca", "cert", "key", "user", "password-file"])? {
        match key {
            "ca" => url.ca = Some(value.into()),
            "cert" => url.cert = Some(value.into()),
            "key" => url.key = Some(value.into()),
            "user" => url.user = Some(value.to_owned()),
            _ => url.password_file = Some(value.into()),
        }
    }
    if url.cert.is_some() != url.key.is_some() {
        return Err("a certificate and its key belong together: cert=FILE&key=FILE".to_owned());
    }
    if url.cert.is_some() && url.ca.is_none() {
        return Err("cert= has no effect without ca=: TLS needs ca=FILE".to_owned());
    }
    Ok(url)
}

impl FromStr for RegistryUrl {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let Some((kind, rest)) = s.split_once(':') else {
            return Err(format!("'{s}' is no registry; write {REGISTRY_FORMS}"));
        };
        let rest = rest.trim_start_matches("//");
        match kind {
            "static" => parse_hosts(rest).map(RegistryUrl::Static),
            "dns" => parse_dns(rest).map(RegistryUrl::Dns),
            "coordinator" => parse_coordinator(rest.trim_end_matches('/')).map(RegistryUrl::Coordinator),
            "etcd" => parse_etcd(rest).map(RegistryUrl::Etcd),
            _ => Err(format!("'{s}' is no registry; write {REGISTRY_FORMS}")),
        }
    }
}

fn join_hosts(nodes: &[HostPort]) -> String {
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegistryUrl::Static(nodes) => write!(f, "static:{}", join_hosts(nodes)),
            RegistryUrl::Dns(name) => write!(f, "dns:{name}"),
            RegistryUrl::Coordinator(at) => write!(f, "coordinator://{at}"),
            RegistryUrl::Etcd(url) => write!(f, "etcd://{url}"),
        }
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        self.server.map_or(Ok(()), |server| write!(f, "?server={server}"))
    }
}

impl fmt::Display for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join_hosts(&self.nodes))?;
        let options = [
            ("ca", path_text(&self.ca)),
            ("cert", path_text(&self.cert)),
            ("key", path_text(&self.key)),
            ("user", self.user.clone()),
            ("password-file", path_text(&self.password_file)),
        ];
        let mut before = '?';
        for (key, value) in options {
            if let Some(value) = value {
                write!(f, "{before}{key}={value}")?;
                before = '&';
            }
        }
        Ok(())
    }
}

fn path_text(path: &Option<PathBuf>) -> Option<String> {
    path.as_ref().map(|path| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries() {
        for (text, normal) in [
            ("static:a:1,[::1]:2", "static:a:1,[::1]:2"),
            ("static://a:1", "static:a:1"),
            ("coordinator://a:1/", "coordinator://a:1"),
            ("coordinator:a:1", "coordinator://a:1"),
            ("dns:nodes.cluster.local:7000", "dns:nodes.cluster.local:7000"),
            ("dns:_spurline._tcp.nodes?server=127.0.0.1:53", "dns:_spurline._tcp.nodes?server=127.0.0.1:53"),
            ("etcd://a:2379,b:2379", "etcd://a:2379,b:2379"),
            ("etcd://a:1/?user=u&ca=/c&password-file=/p", "etcd://a:1?ca=/c&user=u&password-file=/p"),
        ] {
            assert_eq!(text.parse::<RegistryUrl>().unwrap().to_string(), normal);
        }
        for (text, says) in [
            ("a:1", "is no registry"),
            ("static:a", "no colon"),
            ("static:a:0", "is not a port"),
            ("static:::1:2", "brackets"),
            ("coordinator://", "no colon"),
            ("coordinator://a:1,b:2", "use etcd://"),
            ("dns:name", "no colon"),
            ("dns:10.0.0.1:7000", "static:10.0.0.1:7000"),
            ("dns:_s._tcp.n:1", "leave the port out"),
            ("dns:n:1?server=x", "no IP:PORT"),
            ("etcd://u:p@h:1", "password-file"),
            ("etcd://h:1?tls=1", "the options are"),
            ("etcd://h:1?cert=/c", "belong together"),
            ("etcd://h:1?cert=/c&key=/k", "ca=FILE"),
        ] {
            let error = text.parse::<RegistryUrl>().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics_and_what_is_taken_comes_back(text in "(static|dns|coordinator|etcd):.{0,40}") {
            if let Ok(registry) = text.parse::<RegistryUrl>() {
                proptest::prop_assert_eq!(registry.to_string().parse::<RegistryUrl>().unwrap(), registry);
            }
        }
    }
}
