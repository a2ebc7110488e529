//! A mount: settings and checks. Opens no store, device or socket.

use crate::fuse::{FuseConfig, RawFuse};
use crate::host::HostLimits;
use crate::log::{LogConfig, MetricsConfig, RawLog};
use crate::values::{SourceUrl, absolute_path};
use crate::volume::{RawVolume, VolumeConfig, VolumeReader};
use spurline_types::fault::Fault;
use std::path::PathBuf;

/// A mount.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RawMount {
    /// Mountpoint: an empty directory
    #[cfg_attr(feature = "clap", arg(value_name = "MOUNTPOINT", index = 2, help_heading = None))]
    pub mountpoint: PathBuf,
    /// The FUSE session.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub fuse: RawFuse,
    /// The volume of the mount.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub volume: RawVolume,
    /// Logs and metrics.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub log: RawLog,
}

/// A mount, ready to run.
#[derive(Debug, Clone)]
pub struct MountConfig {
    /// The volume of the mount.
    pub volume: VolumeConfig,
    /// The mountpoint, absolute; whether it exists is for the mount to find out.
    pub mountpoint: PathBuf,
    /// The FUSE session.
    pub fuse: FuseConfig,
    /// Logs.
    pub log: LogConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
    /// The file of the access log.
    pub access_log: Option<PathBuf>,
    /// Leave a keeper behind, which starts the mount's process again when that dies.
    pub recover: bool,
}
impl RawMount {
    /// The defaults, for `source` at `mountpoint`.
    pub fn new(source: SourceUrl, mountpoint: PathBuf) -> Self {
        RawMount { mountpoint, fuse: RawFuse::default(), volume: RawVolume::new(source), log: RawLog::default() }
    }

    /// Checks everything that can be checked before the mount starts.
    ///
    /// # Errors
    /// Wrong values with exit code 2, missing abilities with exit code 3.
    pub fn check(self, host: &HostLimits) -> Result<MountConfig, Fault> {
        let mountpoint = absolute_path(&self.mountpoint);
        let fuse = self.fuse.check()?;
        let writes = self.fuse.check_writes()?;
        if let Some(writes) = writes {
            self.volume.check_changes(self.fuse.bucket, "--rw")?;
            self.volume.check_stage(writes)?;
        }
        self.fuse.check_recovery()?;
        let name = mountpoint.display().to_string();
        let reader = VolumeReader {
            name: name.clone(),
            place: &name,
            metadata_ttl: fuse.cache_times().behind,
            kernel: Some(&fuse),
            s3: false,
        };
        let volume = self.volume.check_for(reader, writes, host)?;
        let volume = VolumeConfig { access_times: self.fuse.access_times(), ..volume };
        let (log, metrics) = self.log.check()?;
        Ok(MountConfig {
            volume,
            mountpoint,
            fuse,
            log,
            metrics,
            access_log: self.fuse.access_log.as_deref().map(absolute_path),
            recover: self.fuse.recover,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::fault::ExitKind;

    #[test]
    fn staged_files_need_a_bucket_and_nodes() {
        let host = HostLimits { root: true, ..HostLimits::detect() };
        let check = |source: &str, registry: Option<&str>| {
            let mut raw = RawMount::new(source.parse().unwrap(), "/mnt".into());
            raw.fuse.rw = true;
            raw.fuse.stage = true;
            raw.volume.group.registry = registry.map(|url| url.parse().unwrap());
            raw.check(&host)
        };
        let staged = check("s3://b/x", Some("coordinator://head:7400")).unwrap();
        assert!(staged.volume.writes.unwrap().stage);
        let alone = check("s3://b/x", None).unwrap_err();
        let said = alone.to_string();
        assert!(said.contains("staged files need two nodes") && said.contains("--registry coordinator://"), "{said}");
        assert_eq!(alone.code, ExitKind::Usage);
        let said = check("/srv", Some("coordinator://head:7400")).unwrap_err().to_string();
        assert!(said.contains("only files of a bucket are staged"), "{said}");
    }
}
