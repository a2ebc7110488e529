//! A gateway: settings and checks. Opens no store and no socket.

use crate::host::HostLimits;
use crate::log::{LogConfig, MetricsConfig, RawLog};
use crate::s3::{RawS3, S3Config};
use crate::values::SourceUrl;
#[cfg(feature = "clap")]
use crate::values::parse_squash;
use crate::volume::{RawVolume, VolumeConfig, VolumeReader};
use crate::writes::{BucketWrites, WritesConfig, check_node_writes};
use spurline_types::fault::Fault;
use std::time::Duration;

/// A gateway.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RawGateway {
    /// The endpoint.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub s3: RawS3,
    /// Take changes of the source: a directory or an S3 bucket
    #[cfg_attr(feature = "clap", arg(long, help_heading = "S3"))]
    pub writable: bool,
    /// Make all changes as this user and group, in place of those of this process
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "UID:GID", value_parser = parse_squash, help_heading = "S3")
    )]
    pub squash: Option<(u32, u32)>,
    /// How a bucket is changed.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub bucket: BucketWrites,
    /// The volume that is served.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub volume: RawVolume,
    /// Logs and metrics.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub log: RawLog,
}

/// A gateway, ready to run.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The volume that is served.
    pub volume: VolumeConfig,
    /// The endpoint.
    pub s3: S3Config,
    /// Logs.
    pub log: LogConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
}

impl RawGateway {
    /// The defaults, for `source`.
    pub fn new(source: SourceUrl) -> Self {
        RawGateway {
            s3: RawS3::default(),
            writable: false,
            squash: None,
            bucket: BucketWrites::default(),
            volume: RawVolume::new(source),
            log: RawLog::default(),
        }
    }

    /// Checks everything that can be checked before the gateway starts.
    ///
    /// # Errors
    /// Wrong values with exit code 2, missing abilities with exit code 3.
    pub fn check(self, host: &HostLimits) -> Result<GatewayConfig, Fault> {
        let source = self.volume.source.clone();
        let Some(s3) = self.s3.check(std::slice::from_ref(&source), self.writable)? else {
            return Err(Fault::usage(
                "a gateway needs an address to listen at",
                "give --s3-listen ADDRESS:PORT, such as 127.0.0.1:9000",
            ));
        };
        let writes = WritesConfig { squash: self.squash, bucket: self.bucket, stage: false };
        let writes = check_node_writes(self.writable, writes, std::slice::from_ref(&source))?;
        if writes.is_some() {
            self.volume.check_changes(self.bucket, "--writable")?;
        }
        let name = format!("gateway {}", s3.listen);
        let place = "gateway";
        let reader = VolumeReader { name, place, metadata_ttl: Duration::from_secs(1), kernel: None, s3: true };
        let volume = self.volume.check_for(reader, writes, host)?;
        let (log, metrics) = self.log.check()?;
        Ok(GatewayConfig { volume, s3, log, metrics })
    }
}
