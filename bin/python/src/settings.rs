//! Settings of a client as Python gives them, by name and as text, in the form that the runtime checks. Knows the names, and no
//! Python object.

use crate::failure::CallFailure;
use rustix::io::Errno;
use spurline_config::{CacheSize, RawVolume, ReplicaCounts, TransportMode};
use spurline_types::{Size, parse_duration};
use std::path::PathBuf;
use std::str::FromStr;

/// Threads of a client that reads, unless the settings say otherwise: enough requests in flight for several nodes.
const DEFAULT_CLIENT_THREADS: usize = 16;
const MOST_CLIENT_THREADS: usize = 256;

pub(crate) struct ClientSettings {
    pub volume: RawVolume,
    /// The folder below which each process has a separate cache folder; `None` without a cache on disk.
    pub cache_dir: Option<PathBuf>,
    /// Threads that make requests.
    pub threads: usize,
    /// Files are written too.
    pub writable: bool,
    /// Files that are written are staged.
    pub stage: bool,
}

impl ClientSettings {
    /// The settings from `source` and pairs of names and values.
    ///
    /// # Errors
    /// `EINVAL` for an unknown name and for a value that does not parse.
    pub fn parse(source: &str, pairs: &[(String, String)]) -> Result<Self, CallFailure> {
        let mut volume = RawVolume::new(parse_value("source", source)?);
        // A program keeps blocks in memory; a disk is used where a folder is named.
        let mut cache_size = std::mem::replace(&mut volume.cache.cache_size, CacheSize::None);
        let threads = DEFAULT_CLIENT_THREADS;
        let mut settings = ClientSettings { volume, cache_dir: None, threads, writable: false, stage: false };
        for (name, value) in pairs {
            if name == "cache_size" {
                cache_size = parse_value::<CacheSize>(name, value)?;
            } else {
                settings.set_one(name, value)?;
            }
        }
        if settings.cache_dir.is_some() {
            settings.volume.cache.cache_size = cache_size;
        }
        Ok(settings)
    }

    fn set_one(&mut self, name: &str, value: &str) -> Result<(), CallFailure> {
        let volume = &mut self.volume;
        match name {
            "registry" => volume.group.registry = Some(parse_value(name, value)?),
            "cache_group" => volume.group.cache_group = Some(value.to_owned()),
            "zone" => value.clone_into(&mut volume.group.zone),
            "token_file" => volume.trust.group_token_file = Some(value.into()),
            "tls" => volume.trust.tls = parse_value(name, value)?,
            "tls_cert" => volume.trust.tls_cert = Some(value.into()),
            "tls_key" => volume.trust.tls_key = Some(value.into()),
            "tls_ca" => volume.trust.tls_ca = Some(value.into()),
            "replicas" => volume.reads.replicas = parse_value::<ReplicaCounts>(name, value)?,
            "group_network" => volume.net.group_network = Some(value.to_owned()),
            "rdma_network" => volume.net.rdma_network = Some(value.to_owned()),
            "transport" => volume.net.transport = parse_transport(value)?,
            "nconnect" => volume.net.nconnect = parse_value(name, value)?,
            "peer_timeout" => volume.net.peer_timeout = parse_time(name, value)?,
            "cache_dir" => self.cache_dir = Some(value.into()),
            "block_size" => volume.cache.block_size = Some(parse_value(name, value)?),
            "free_space_ratio" => volume.cache.free_space_ratio = parse_value(name, value)?,
            "memory" => volume.memory.buffer_size = parse_value::<Size>(name, value)?,
            "endpoint_url" => volume.under.endpoint_url = Some(value.to_owned()),
            "region" => volume.under.region = Some(value.to_owned()),
            "anonymous" => volume.under.anonymous = parse_value(name, value)?,
            "request_payer" => volume.under.request_payer = parse_value(name, value)?,
            "expected_bucket_owner" => volume.under.expected_bucket_owner = Some(value.to_owned()),
            "origin_timeout" => volume.under.timeout = parse_time(name, value)?,
            "max_downloads" => volume.under.max_downloads = parse_value(name, value)?,
            "threads" => self.threads = parse_value::<usize>(name, value)?.clamp(1, MOST_CLIENT_THREADS),
            "writable" => self.writable = parse_value(name, value)?,
            "stage" => self.stage = parse_value(name, value)?,
            _ => {
                return Err(CallFailure::new(
                    Errno::INVAL,
                    format!("there is no setting '{name}'; see help(spurline.open)"),
                ));
            }
        }
        Ok(())
    }
}

/// The flags of messages of the runtime, and the settings of Python with the same meaning.
const FLAGS_OF_SETTINGS: [(&str, &str); 27] = [
    ("--registry", "registry"),
    ("--cache-group", "cache_group"),
    ("--zone", "zone"),
    ("--group-token-file", "token_file"),
    ("--tls-cert", "tls_cert"),
    ("--tls-key", "tls_key"),
    ("--tls-ca", "tls_ca"),
    ("--tls", "tls"),
    ("--replicas", "replicas"),
    ("--group-network", "group_network"),
    ("--rdma-network", "rdma_network"),
    ("--transport", "transport"),
    ("--nconnect", "nconnect"),
    ("--peer-timeout", "peer_timeout"),
    ("--cache-dir", "cache_dir"),
    ("--cache-size", "cache_size"),
    ("--block-size", "block_size"),
    ("--free-space-ratio", "free_space_ratio"),
    ("--buffer-size", "memory"),
    ("--endpoint-url", "endpoint_url"),
    ("--anonymous", "anonymous"),
    ("--request-payer", "request_payer"),
    ("--expected-bucket-owner", "expected_bucket_owner"),
    ("--origin-timeout", "origin_timeout"),
    ("--max-downloads", "max_downloads"),
    // Not the node's --stage-size.
    ("--stage ", "stage "),
    ("--stage:", "stage:"),
];

/// A message of the runtime with the names that Python has for settings, in place of flags.
pub(crate) fn with_names_of_settings(message: &str) -> String {
    let mut message = message.to_owned();
    for (flag, setting) in FLAGS_OF_SETTINGS {
        message = message.replace(flag, setting);
    }
    message
}

fn parse_value<T: FromStr<Err: ToString>>(name: &str, value: &str) -> Result<T, CallFailure> {
    value.parse().map_err(|why: T::Err| {
        CallFailure::new(Errno::INVAL, format!("{name}={value:?}: {}; see help(spurline.open)", why.to_string()))
    })
}

fn parse_time(name: &str, value: &str) -> Result<std::time::Duration, CallFailure> {
    parse_duration(value).map_err(|why| CallFailure::new(Errno::INVAL, format!("{name}={value:?}: {why}")))
}

fn parse_transport(value: &str) -> Result<TransportMode, CallFailure> {
    match value {
        "auto" => Ok(TransportMode::Auto),
        "tcp" => Ok(TransportMode::Tcp),
        "rdma" => Ok(TransportMode::Rdma),
        _ => Err(CallFailure::new(Errno::INVAL, format!("transport={value:?}: give 'auto', 'tcp' or 'rdma'"))),
    }
}
