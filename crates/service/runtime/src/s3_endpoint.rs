//! Starts the S3 endpoint of a node or a gateway over opened sources. Knows no signal and no command line.

use crate::setup;
use crate::writable_files::files_without_kernel;
use rustix::io::Errno;
use spurline_config::{Fault, MemoryBudget, S3Config, WritesConfig};
use spurline_fs::FileService;
use spurline_s3::{AccessKeys, EndpointCertificate, EndpointConfig, EndpointLimits, S3Endpoint, SourceBucket};
use spurline_types::{Error, ErrorKind, Stats};
use spurline_volume::Volume;
use spurline_volume::writes::WritableVolume;
use std::path::PathBuf;
use std::sync::Arc;

/// Threads for calls on sources: more than a link needs, and each may wait for the origin.
const ENDPOINT_THREADS: usize = 128;

/// The files of an endpoint: the keys of clients, and the certificate.
pub(crate) struct EndpointFiles {
    keys: Option<AccessKeys>,
    certificate: Option<EndpointCertificate>,
}

impl EndpointFiles {
    /// Reads the files. This comes before cache disks and sources are opened: a wrong file costs no time.
    ///
    /// # Errors
    /// When the keys or the certificate can't be read.
    pub fn read(config: &S3Config) -> Result<Self, Fault> {
        let keys = config.keys.as_deref().map(AccessKeys::read_file).transpose().map_err(missing)?;
        let certificate = match &config.certificate {
            Some(files) => Some(EndpointCertificate::read_files(&files.cert, &files.key).map_err(missing)?),
            None => None,
        };
        Ok(EndpointFiles { keys, certificate })
    }
}

/// Starts the endpoint; `upload_dir` takes parts of uploads where the configuration names no directory.
///
/// # Errors
/// When the address is not available, or uploads have no directory.
pub(crate) fn start_endpoint(
    config: &S3Config,
    files: EndpointFiles,
    buckets: Vec<SourceBucket>,
    budget: &MemoryBudget,
    block_size: u64,
    upload_dir: Option<PathBuf>,
    stats: &Arc<Stats>,
) -> Result<S3Endpoint, Fault> {
    let pieces = budget.s3_bytes / spurline_config::budget::S3_PIECE;
    let pins = budget.memory_tier / 2 / block_size;
    let limits = EndpointLimits {
        connections: (budget.s3_bytes / spurline_config::budget::S3_CONNECTION) as usize,
        large_pieces: pieces as usize,
        pinned_pieces: pins.max(budget.serve_slots).min(pieces) as usize,
        threads: ENDPOINT_THREADS,
    };
    let upload_dir = config.upload_dir.clone().or(upload_dir).unwrap_or_else(std::env::temp_dir);
    let domain = config.domain.clone();
    if buckets.iter().any(|bucket| bucket.writes.is_some()) {
        S3Endpoint::check_upload_dir(&upload_dir).map_err(|error| {
            Fault::missing(error.message(), "give another directory for the parts of uploads with --s3-upload-dir")
        })?;
    }
    let EndpointFiles { keys, certificate } = files;
    let endpoint = EndpointConfig { listen: config.listen, keys, certificate, domain, limits, upload_dir };
    S3Endpoint::start(endpoint, buckets, stats).map_err(|error| {
        const IN_USE: ErrorKind = ErrorKind::Io(Errno::ADDRINUSE.raw_os_error());
        const NOT_HERE: ErrorKind = ErrorKind::Io(Errno::ADDRNOTAVAIL.raw_os_error());
        let remedy = match error.kind() {
            IN_USE => {
                "another program listens there (ss -ltnp shows which): give another address or port with --s3-listen"
            }
            NOT_HERE => "no interface of this host has the address (ip address): give another address with --s3-listen",
            _ => "give another address or port with --s3-listen",
        };
        Fault::missing(error.message(), remedy)
    })
}

/// A file that can't be read is a missing prerequisite, and a wrong one a usage error.
fn missing(error: Error) -> Fault {
    match error.kind() {
        ErrorKind::Invalid => Fault::usage(error.message(), ""),
        _ => Fault::missing(error.message(), ""),
    }
}

/// The files of a source that S3 clients change, as this process's user.
pub(crate) fn bucket_writes(
    volume: &Arc<dyn Volume>,
    source: Arc<dyn WritableVolume>,
    writes: &WritesConfig,
    stats: &Arc<Stats>,
) -> Result<Arc<dyn FileService>, Fault> {
    Ok(files_without_kernel(volume, source, writes.squash, None, stats)?)
}

/// The line that people and scripts wait for.
pub(crate) fn log_endpoint(endpoint: &S3Endpoint, config: &S3Config) {
    let scheme = if config.certificate.is_some() { "https" } else { "http" };
    let buckets: Vec<String> =
        config.buckets.iter().map(|bucket| format!("{} ({})", bucket.name, bucket.source)).collect();
    tracing::info!("buckets: {}; up to {} connections", buckets.join(", "), endpoint.connection_limit());
    tracing::info!("serving S3 on {scheme}://{}", endpoint.address());
}

/// Ends an endpoint within the grace of a stop.
pub(crate) fn stop_endpoint(endpoint: S3Endpoint) {
    endpoint.stop(std::time::Instant::now() + setup::STOP_PATIENCE);
}
