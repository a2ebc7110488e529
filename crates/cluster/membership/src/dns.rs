//! `dns:`: a name that resolves to all nodes (A and AAAA, a Kubernetes headless service), or SRV records that bring
//! ports and names of their own. Asked again by the records' time to live; it is told nothing.

use crate::url::DnsName;
use crate::{ANSWER, Lease, Registry, Watch, runtime};
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

/// Between two questions, whatever the time to live says.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A name as a registry.
pub(crate) struct Dns {
    url: String,
    name: DnsName,
    resolver: Arc<TokioResolver>,
    runtime: Arc<Runtime>,
}

impl Dns {
    pub(crate) fn new(name: &DnsName) -> Result<Self> {
        let runtime = runtime("dns")?;
        let inside = runtime.enter();
        let builder = match name.server {
            Some(server) => Ok(Resolver::builder_with_config(only(server), TokioRuntimeProvider::default())),
            None => TokioResolver::builder_tokio(),
        };
        let built = builder.and_then(|mut builder| {
            let options = builder.options_mut();
            options.timeout = ANSWER / 2;
            // What a record's time to live says is kept here, where it is known when to ask again.
            options.cache_size = 0;
            builder.build()
        });
        drop(inside);
        let resolver = built.map_err(|e| Error::new(ErrorKind::Unavailable, format!("dns:{}: {e}", name.name)))?;
        Ok(Dns {
            url: format!("dns:{name}"),
            name: name.clone(),
            resolver: Arc::new(resolver),
            runtime: Arc::new(runtime),
        })
    }
}

/// A configuration with one server, at a port of choice.
fn only(server: SocketAddr) -> ResolverConfig {
    let mut name_server = NameServerConfig::udp_and_tcp(server.ip());
    name_server.trust_negative_responses = true;
    for connection in &mut name_server.connections {
        connection.port = server.port();
    }
    ResolverConfig::from_parts(None, Vec::new(), vec![name_server])
}

impl Registry for Dns {
    fn describe(&self) -> &str {
        &self.url
    }
    fn watch(&self) -> Box<dyn Watch> {
        Box::new(Asking {
            name: self.name.clone(),
            resolver: Arc::clone(&self.resolver),
            runtime: Arc::clone(&self.runtime),
            again: None,
            known: None,
        })
    }
    fn lease(&self) -> Option<Box<dyn Lease>> {
        None
    }
}

struct Asking {
    name: DnsName,
    resolver: Arc<TokioResolver>,
    runtime: Arc<Runtime>,
    /// When to ask again.
    again: Option<Instant>,
    known: Option<Vec<Arc<Member>>>,
}

impl Asking {
    async fn ask(&self) -> Result<(Vec<Arc<Member>>, Duration)> {
        let mut members = Vec::new();
        let mut lasts = PAUSES.1;
        let kinds: &[RecordType] = match self.name.port {
            Some(_) => &[RecordType::A, RecordType::AAAA],
            None => &[RecordType::SRV],
        };
        for kind in kinds {
            match self.resolver.lookup(self.name.name.as_str(), *kind).await {
                Ok(answer) => {
                    lasts = lasts.min(answer.valid_until().saturating_duration_since(Instant::now()));
                    self.take(&answer, &mut members);
                }
                Err(error) if none_there(&error) => lasts = PAUSES.0,
                Err(error) => return Err(Error::new(ErrorKind::Unavailable, error.to_string())),
            }
        }
        members.sort_by(|a, b| a.name.cmp(&b.name));
        members.dedup();
        let members = members.into_iter().map(Arc::new).collect();
        Ok((members, lasts.clamp(PAUSES.0, PAUSES.1)))
    }

    fn take(&self, answer: &Lookup, members: &mut Vec<Member>) {
        for record in answer.answers() {
            let address = match (&record.data, self.name.port) {
                (RData::A(a), Some(port)) => SocketAddr::new(a.0.into(), port).to_string(),
                (RData::AAAA(a), Some(port)) => SocketAddr::new(a.0.into(), port).to_string(),
                (RData::SRV(srv), None) => {
                    format!("{}:{}", srv.target.to_utf8().trim_end_matches('.'), srv.port)
                }
                _ => continue,
            };
            members.push(Member::at(&address, 100));
        }
    }
}

/// Whether the server answers that there is nothing under the name, or not of this kind.
fn none_there(error: &NetError) -> bool {
    error.is_no_records_found() || error.is_nx_domain()
}

impl Watch for Asking {
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        if let Some(again) = self.again {
            std::thread::sleep(again.min(until).saturating_duration_since(Instant::now()));
            if Instant::now() < again {
                return Ok(None);
            }
        }
        let runtime = Arc::clone(&self.runtime);
        let answer = runtime.block_on(async { tokio::time::timeout(ANSWER, self.ask()).await });
        let (members, lasts) = answer.unwrap_or_else(|_| {
            let text = format!("no answer within {} s", ANSWER.as_secs());
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
