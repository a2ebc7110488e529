//! `dns:`: a name that resolves to all nodes (A and AAAA, a Kubernetes headless service), or SRV records with ports and names.
//! Looked up again by the records' time to live; takes no registrations.

use crate::url::DnsName;
use crate::{ANSWER_TIMEOUT, MemberWatch, NodeLease, Registry, small_runtime};
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use hickory_resolver::{Resolver, TokioResolver};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Between two look-ups, whatever the time to live is.
const POLL_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A DNS name as a registry.
pub(crate) struct DnsRegistry {
    url: String,
    name: DnsName,
    resolver: Arc<TokioResolver>,
    runtime: Arc<Runtime>,
}

impl DnsRegistry {
    pub(crate) fn new(name: &DnsName) -> Result<Self> {
        let runtime = small_runtime("dns")?;
        let inside = runtime.enter();
        let builder = match name.server {
            Some(server) => Ok(Resolver::builder_with_config(single_server(server), TokioRuntimeProvider::default())),
            None => TokioResolver::builder_tokio(),
        };
        let built = builder.and_then(|mut builder| {
            let options = builder.options_mut();
            options.timeout = ANSWER_TIMEOUT / 2;
            // The watch keeps the time to live itself: the watch must know when to look up again.
            options.cache_size = 0;
            builder.build()
        });
        drop(inside);
        let resolver = built.map_err(|e| Error::new(ErrorKind::Unavailable, format!("dns:{}: {e}", name.name)))?;
        Ok(DnsRegistry {
            url: format!("dns:{name}"),
            name: name.clone(),
            resolver: Arc::new(resolver),
            runtime: Arc::new(runtime),
        })
    }
}

/// A configuration with a single server at a given port.
fn single_server(server: SocketAddr) -> ResolverConfig {
    let mut name_server = NameServerConfig::udp_and_tcp(server.ip());
    name_server.trust_negative_responses = true;
    for connection in &mut name_server.connections {
        connection.port = server.port();
    }
    ResolverConfig::from_parts(None, Vec::new(), vec![name_server])
}

impl Registry for DnsRegistry {
    fn description(&self) -> &str {
        &self.url
    }
    fn watch_members(&self) -> Box<dyn MemberWatch> {
        Box::new(DnsWatch {
            name: self.name.clone(),
            resolver: Arc::clone(&self.resolver),
            runtime: Arc::clone(&self.runtime),
            again: None,
            known: None,
        })
    }
    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        None
    }
}

struct DnsWatch {
    name: DnsName,
    resolver: Arc<TokioResolver>,
    runtime: Arc<Runtime>,
    /// When to look up again.
    again: Option<Instant>,
    known: Option<Vec<Arc<Member>>>,
}

impl DnsWatch {
    async fn look_up(&self) -> Result<(Vec<Arc<Member>>, Duration)> {
        let mut members = Vec::new();
        let mut lasts = POLL_RANGE.1;
        let kinds: &[RecordType] = match self.name.port {
            Some(_) => &[RecordType::A, RecordType::AAAA],
            None => &[RecordType::SRV],
        };
        for kind in kinds {
            match self.resolver.lookup(self.name.name.as_str(), *kind).await {
                Ok(answer) => {
                    lasts = lasts.min(answer.valid_until().saturating_duration_since(Instant::now()));
                    self.collect_members(&answer, &mut members);
                }
                Err(error) if is_absent(&error) => lasts = POLL_RANGE.0,
                Err(error) => return Err(Error::new(ErrorKind::Unavailable, error.to_string())),
            }
        }
        members.sort_by(|a, b| a.name.cmp(&b.name));
        members.dedup();
        let members = members.into_iter().map(Arc::new).collect();
        Ok((members, lasts.clamp(POLL_RANGE.0, POLL_RANGE.1)))
    }

    fn collect_members(&self, answer: &Lookup, members: &mut Vec<Member>) {
        for record in answer.answers() {
            let address = match (&record.data, self.name.port) {
                (RData::A(a), Some(port)) => SocketAddr::new(a.0.into(), port).to_string(),
                (RData::AAAA(a), Some(port)) => SocketAddr::new(a.0.into(), port).to_string(),
                (RData::SRV(srv), None) => {
                    format!("{}:{}", srv.target.to_utf8().trim_end_matches('.'), srv.port)
                }
                _ => continue,
            };
            members.push(Member::from_address(&address, 100));
        }
    }
}

/// Whether the server answered that the name, or this kind of record, does not exist.
fn is_absent(error: &NetError) -> bool {
    error.is_no_records_found() || error.is_nx_domain()
}

impl MemberWatch for DnsWatch {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        if let Some(again) = self.again {
            std::thread::sleep(again.min(until).saturating_duration_since(Instant::now()));
            if Instant::now() < again {
                return Ok(None);
            }
        }
        let runtime = Arc::clone(&self.runtime);
        let answer = runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, self.look_up()).await });
        let (members, lasts) = answer.unwrap_or_else(|_| {
            let text = format!("no answer within {} s", ANSWER_TIMEOUT.as_secs());
            Err(Error::new(ErrorKind::Unavailable, text))
        })?;
        self.again = Some(Instant::now() + lasts);
        if self.known.as_ref() == Some(&members) {
            return Ok(None);
        }
        self.known = Some(members.clone());
        Ok(Some(members))
    }
}
