//! Starts the S3 endpoint of a node or a gateway over opened sources. Knows no signal and no command line.

use crate::setup;
use spurline_config::{Fault, MemoryBudget, S3Config, WritesConfig};
use spurline_fs::writable::{WritableConfig, WritableFileSystem};
use spurline_s3::{
    AccessKeys, BucketWrites, EndpointCertificate, EndpointConfig, EndpointLimits, S3Endpoint, SourceBucket,
};
use spurline_types::{Error, ErrorKind, Stats};
use spurline_volume::Volume;
use spurline_volume::writes::WritableVolume;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Threads for calls on sources: more than a link needs, and each may wait for the origin.
const ENDPOINT_THREADS: usize = 128;
/// How long attributes that came with the answer to a change may be used again.
const S3_ANSWER_TTL: Duration = Duration::from_secs(1);

/// Starts the endpoint; `upload_dir` takes parts of uploads where the configuration names no directory.
///
/// # Errors
/// When the keys or the certificate can't be read, or the address is not available.
pub(crate) fn start_endpoint(
    config: &S3Config,
    buckets: Vec<SourceBucket>,
    budget: &MemoryBudget,
    block_size: u64,
    upload_dir: Option<PathBuf>,
    stats: &Arc<Stats>,
) -> Result<S3Endpoint, Fault> {
    let keys = config.keys.as_deref().map(AccessKeys::read_file).transpose().map_err(missing)?;
    let certificate = match &config.certificate {
        Some(files) => Some(EndpointCertificate::read_files(&files.cert, &files.key).map_err(missing)?),
        None => None,
    };
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
    let endpoint = EndpointConfig { listen: config.listen, keys, certificate, domain, limits, upload_dir };
    let endpoint = S3Endpoint::start(endpoint, buckets, stats);
    endpoint.map_err(|error| {
        Fault::missing(
            error.message(),
            "give another address with --s3-listen, or another directory with --s3-upload-dir",
        )
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
///
/// # Errors
/// The source's error for its root.
pub(crate) fn bucket_writes(
    volume: &Arc<dyn Volume>,
    source: Arc<dyn WritableVolume>,
    writes: &WritesConfig,
    stats: &Arc<Stats>,
) -> Result<BucketWrites, Fault> {
    let config = WritableConfig {
        attr_ttl: S3_ANSWER_TTL,
        entry_ttl: S3_ANSWER_TTL,
        dir_entry_ttl: S3_ANSWER_TTL,
        negative_ttl: S3_ANSWER_TTL,
        // No kernel has checked anything before: the source decides.
        kernel_checks: false,
        // The endpoint's lookup counts limit the memory.
        inode_bytes: u64::MAX,
        max_readahead: 0,
        readahead_budget: 0,
        owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        squash: writes.squash,
    };
    let publishes = source.capabilities().publishes;
    let files = WritableFileSystem::new(Arc::clone(volume), source, config, Arc::clone(stats));
    let files = files.map_err(|error| Fault::failed(format!("{}: {error}", volume.source()), ""))?;
    Ok(BucketWrites { files: Arc::new(files), publishes })
}

/// The line that people and scripts wait for.
pub(crate) fn log_endpoint(endpoint: &S3Endpoint, config: &S3Config) {
    let scheme = if config.certificate.is_some() { "https" } else { "http" };
    let buckets: Vec<String> =
        config.buckets.iter().map(|bucket| format!("{} ({})", bucket.name, bucket.source)).collect();
    tracing::info!("buckets: {}", buckets.join(", "));
    tracing::info!("serving S3 on {scheme}://{}", endpoint.address());
}

/// Ends an endpoint within the grace of a stop.
pub(crate) fn stop_endpoint(endpoint: S3Endpoint) {
    endpoint.stop(std::time::Instant::now() + setup::STOP_PATIENCE);
}
