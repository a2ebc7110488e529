//! Other file systems over the S3 server of a section, where installed: JuiceFS with its names in Redis, and s3fs.

use super::s3_server::{S3_BUCKET, S3Process};
use super::setup::{BenchSuite, CpuRole, optional};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::mount::MountUnderTest;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const FORMAT_TIMEOUT: Duration = Duration::from_secs(60);

/// A file system of others.
pub(super) struct Peer<'a> {
    suite: &'a BenchSuite,
    server: &'a S3Process,
    pub(super) variant: &'static str,
    pub(super) label: &'static str,
    /// The server of the names, and its URL.
    names: Option<(ServerProcess, String)>,
    /// More flags of the mount.
    flags: &'static [&'static str],
}

/// A mount of a file system of others.
pub(super) struct PeerMount(MountUnderTest);

impl Drop for PeerMount {
    fn drop(&mut self) {
        // JuiceFS ends with the mount only; the end of the process is awaited next.
        let _ = Command::new("umount").arg(self.0.at()).status();
    }
}

impl PeerMount {
    pub(super) fn at(&self) -> &Path {
        self.0.at()
    }

    pub(super) fn roles<'a>(&'a self, server: &'a S3Process) -> [CpuRole<'a>; 2] {
        [("mount", self.0.daemon()), ("server", server.daemon())]
    }
}

impl<'a> Peer<'a> {
    /// The installed file systems, with notes on the others.
    pub(super) fn open_all(
        suite: &'a BenchSuite,
        server: &'a S3Process,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Peer<'a>>> {
        let s3fs = child::require_program("s3fs", "s3fs");
        let s3fs = s3fs.map(|_| Peer { suite, server, variant: "s3fs", label: "s3fs", names: None, flags: &[] });
        let juicefs = optional(notes, "JuiceFS", Peer::format_juicefs(suite, server, "juicefs"))?;
        Ok(juicefs.into_iter().chain(optional(notes, "s3fs", s3fs)?).collect())
    }

    /// JuiceFS with an empty Redis, in a folder of the bucket.
    fn format_juicefs(suite: &'a BenchSuite, server: &'a S3Process, folder: &str) -> Result<Peer<'a>> {
        let redis = child::require_program("redis-server", "redis-server")?;
        let juicefs = child::find_program("juicefs");
        let juicefs = juicefs.ok_or_else(|| BenchError::Missing("juicefs is not installed".into()))?;
        let port = child::free_port().map_err(|e| BenchError::io("no free port", &e))?;
        let mut command = Command::new(redis);
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        let mut redis = ServerProcess::start(command, "redis-server", &suite.memory.log(&format!("redis-{folder}"))?)?;
        redis.wait_for_listener(&format!("127.0.0.1:{port}"))?;
        let url = format!("redis://127.0.0.1:{port}/1");
        let [(_, key), (_, secret), (_, endpoint), _] = server.env();
        let mut command = Command::new(juicefs);
        command.args(["format", "--storage", "s3", "--bucket", &format!("{endpoint}/{S3_BUCKET}")]);
        command.args(["--access-key", key, "--secret-key", secret, &url, folder]);
        child::run_to_end(command, FORMAT_TIMEOUT)?;
        let names = Some((redis, url));
        Ok(Peer { suite, server, variant: "juicefs", label: "JuiceFS, names in Redis", names, flags: &[] })
    }

    /// JuiceFS that answers a close when the bytes are in the cache of the mount's machine, where it is installed.
    pub(super) fn open_writeback(suite: &'a BenchSuite, server: &'a S3Process) -> Result<Peer<'a>> {
        let peer = Peer::format_juicefs(suite, server, "writeback")?;
        Ok(Peer { variant: "writeback", label: "JuiceFS --writeback, one copy", flags: &["--writeback"], ..peer })
    }

    /// A mount with an empty cache.
    pub(super) fn mount(&self) -> Result<PeerMount> {
        let memory = &self.suite.memory;
        let at = memory.scratch.subdir(&format!("mnt-{}", self.variant))?;
        let cache = memory.empty_dir(&format!("cache-{}", self.variant))?;
        let mut command;
        if let Some((_, url)) = &self.names {
            command = Command::new("juicefs");
            command.args(["mount", "--no-usage-report", "--backup-meta", "0", "--cache-dir", &cache]);
            command.args(self.flags).arg(url).arg(&at);
        } else {
            command = Command::new("s3fs");
            command.arg(S3_BUCKET).arg(&at).args(["-f", "-o", "use_path_request_style"]);
            command.args(["-o", &format!("use_cache={cache}"), "-o", &format!("url={}", self.server.env()[2].1)]);
        }
        command.envs(self.server.env());
        MountUnderTest::start(command, Path::new(""), &at, None, &memory.log(self.variant)?).map(PeerMount)
    }
}
