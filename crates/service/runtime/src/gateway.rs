//! Starts a gateway: a volume, alone or from the nodes of a group, behind an S3 endpoint. Knows no signal and no command line.

use crate::admin::{AdminServices, ProcessTarget};
use crate::s3_endpoint::{EndpointFiles, bucket_writes, log_endpoint, start_endpoint, stop_endpoint};
use crate::volume::{OpenVolume, open_volume};
use crate::writes::{KernelRules, finish_writes, open_writes};
use crate::{peer_status, setup};
use spurline_config::{Fault, GatewayConfig};
use spurline_observe::documents::{GatewayStatus, InfoDocument, ProcessRole};
use spurline_observe::locate::SocketOwner;
use spurline_s3::{S3Endpoint, SourceBucket};
use spurline_types::Stats;
use spurline_volume::delayed::DelayedWrites;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// A gateway that serves. Field order is drop order.
pub struct RunningGateway {
    endpoint: S3Endpoint,
    admin: AdminServices,
    /// Kept alive here: the admin services have a weak view.
    _target: Arc<ProcessTarget>,
    behind: Option<Arc<dyn DelayedWrites>>,
    files: Option<Arc<dyn spurline_fs::FileService>>,
    volume: OpenVolume,
    config: GatewayConfig,
}

/// Starts the gateway, which serves when this returns.
///
/// # Errors
/// When the source, the group or the address can't be used.
pub fn start_gateway(config: GatewayConfig) -> Result<RunningGateway, Fault> {
    let started = Instant::now();
    let stats = Arc::new(Stats::default());
    let endpoint_files = EndpointFiles::read(&config.s3)?;
    let volume = open_volume(&config.volume, &stats)?;
    let writes = open_writes(&config.volume, &volume, &stats, KernelRules::default(), None, "leave --writable out")?;
    let behind = writes.as_ref().and_then(|writes| writes.behind.clone());
    let changed = match (writes, &config.volume.writes) {
        (Some(open), Some(writes)) => Some(bucket_writes(volume.volume(), open.source, writes, &stats)?),
        _ => None,
    };
    let files = changed.clone();
    let name = config.s3.buckets.first().map(|bucket| bucket.name.clone()).unwrap_or_default();
    let bucket = SourceBucket { name: name.clone(), volume: Arc::clone(volume.volume()), writes: changed };
    let upload_dir = config.volume.cache.dirs.first().filter(|_| volume.store.is_some()).cloned();
    let block_size = volume.volume().block_size();
    let budget = &config.volume.budget;
    let endpoint = start_endpoint(&config.s3, endpoint_files, vec![bucket], budget, block_size, upload_dir, &stats)?;
    let address = endpoint.address().to_string();
    let target = admin_target(&config, &volume, &address, &stats, started);
    let admin = AdminServices::open(SocketOwner::Node(&address), &config.metrics, &target)?;
    Ok(RunningGateway { endpoint, admin, _target: target, behind, files, volume, config })
}

fn admin_target(
    config: &GatewayConfig,
    volume: &OpenVolume,
    address: &str,
    stats: &Arc<Stats>,
    started: Instant,
) -> Arc<ProcessTarget> {
    let pool = Arc::clone(&volume.pool);
    let tier = Arc::clone(&volume.tier);
    let info = Arc::clone(volume.volume());
    let store = volume.store.clone();
    let disks = volume.store.clone();
    let remote = volume.remote.clone();
    let buckets = volume.buckets.clone();
    let checked = volume.buckets.clone();
    let known = GatewayStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        source: config.volume.source.to_string(),
        address: address.to_owned(),
        bucket: config.s3.buckets.first().map(|bucket| bucket.name.clone()).unwrap_or_default(),
        writable: config.volume.writes.is_some(),
        ..GatewayStatus::default()
    };
    let counted = Arc::clone(stats);
    Arc::new(ProcessTarget {
        stats: Arc::clone(stats),
        started,
        gauges: Box::new(move |stats| setup::set_memory_gauges(&pool, &tier, stats)),
        info: Box::new(move |path| Ok(InfoDocument { file: info.info(path)?, writes: None, reads: None })),
        role: Box::new(move || {
            ProcessRole::Gateway(GatewayStatus {
                state: setup::origin_state(&counted).to_owned(),
                disks: setup::disk_status(store.as_deref()),
                peers: remote.as_deref().map(peer_status::peer_status).unwrap_or_default(),
                origin_errors: setup::origin_errors(&buckets),
                ..known.clone()
            })
        }),
        jobs: Err("a gateway runs no jobs; name a path in a mount, or a coordinator"),
        export: None,
        upgrade: None,
        health: Box::new(move || {
            setup::check_disks(&disks.as_deref().map(|store| store.disks()).unwrap_or_default())?;
            setup::check_credentials(&checked)
        }),
        metrics_address: OnceLock::new(),
    })
}

impl RunningGateway {
    /// Logs the lines that people and scripts wait for. To be called when signals are handled.
    pub fn log_start(&self) {
        setup::log_memory(&self.config.volume.budget, self.config.volume.cache.size, self.volume.store.is_some());
        log_endpoint(&self.endpoint, &self.config.s3);
    }

    /// As [`OpenVolume::keep_directories`].
    pub fn keep_directories(&mut self) {
        self.volume.keep_directories();
    }

    /// Answers the requests under way within [`setup::STOP_PATIENCE`], makes changes durable, and ends.
    ///
    /// # Errors
    /// When bytes are lost, because no node took the bytes.
    pub fn stop(self) -> Result<(), Fault> {
        tracing::info!("stopping");
        let RunningGateway { endpoint, admin, _target, behind, files, volume, config } = self;
        stop_endpoint(endpoint);
        if let Some(files) = files {
            files.close_all();
        }
        let ended = behind.map_or(Ok(()), |behind| finish_writes(&*behind, config.volume.source.as_str()));
        drop(admin);
        drop(volume);
        ended
    }
}
