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
    /// A change of a client waits for the disks of two nodes, in place of the store; the nodes upload the object soon after
    ///
    /// With --writable and a bucket, through nodes with --stage-size. Folders that are to be written so through every gateway
    /// and mount have a rule: spurline limit FOLDER --stage.
    #[cfg_attr(feature = "clap", arg(long, help_heading = "Writing to a bucket"))]
    pub stage: bool,
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
            stage: false,
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
        let writes = WritesConfig { squash: self.squash, bucket: self.bucket, stage: self.stage };
        let writes = check_node_writes(self.writable, writes, std::slice::from_ref(&source))?;
        if writes.is_some() {
            self.volume.check_changes(self.bucket, "--writable")?;
            self.volume.check_stage(WritesConfig { stage: self.stage, ..WritesConfig::default() })?;
        }
        let name = format!("gateway {}", s3.listen);
        let place = "gateway";
        let reader = VolumeReader { name, place, metadata_ttl: Duration::from_secs(1), kernel: None, s3: true };
        let volume = self.volume.check_for(reader, writes, host)?;
        let (log, metrics) = self.log.check()?;
        Ok(GatewayConfig { volume, s3, log, metrics })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_staged_by_nodes_only() {
        let check = |writable: bool, registry: Option<&str>| {
            let mut raw = RawGateway::new("s3://data/run".parse().unwrap());
            raw.s3.s3_listen = Some("127.0.0.1:9000".parse().unwrap());
            raw.s3.s3_writable_without_keys = writable;
            raw.writable = writable;
            raw.stage = true;
            raw.volume.group.registry = registry.map(|registry| registry.parse().unwrap());
            raw.check(&HostLimits::detect()).map_err(|fault| fault.to_string())
        };
        let staged = check(true, Some("coordinator://head:7400")).unwrap();
        assert!(staged.volume.writes.unwrap().stage);
        let said = check(true, None).unwrap_err();
        assert!(said.contains("staged files need two nodes") && said.contains("--registry coordinator://"), "{said}");
        let said = check(false, Some("coordinator://head:7400")).unwrap_err();
        assert!(said.contains("--stage has no effect") && said.contains("--writable"), "{said}");
    }
}
