//! The place of a run: the program under test, a folder for files, mountpoints and logs, and the machine. Starts mounts and nodes.

use crate::child;
use crate::error::{BenchError, Result};
use crate::machine;
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::report::ReportOutputs;
use crate::scratch::{self, ScratchDir};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Flags of the commands that make own files and mounts.
#[derive(Debug, clap::Args)]
pub struct WorkArgs {
    /// Forms of the report.
    #[command(flatten)]
    pub report: ReportOutputs,
    /// Folder for own files, caches and mountpoints
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub work_dir: PathBuf,
    /// The spurline to measure [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "FILE")]
    pub spurline: Option<PathBuf>,
}

impl WorkArgs {
    /// The place of a run with these flags.
    /// `Missing` without the folder; `Failed` when nothing can be made there.
    pub fn open(&self, purpose: &str) -> Result<Workplace> {
        Workplace::new(&self.work_dir, purpose, "--work-dir", self.spurline.as_deref())
    }
}

/// The program under test: the given program, the program beside this one, or the first in PATH.
/// `Missing` when there is none.
pub fn find_spurline(given: Option<&Path>) -> Result<PathBuf> {
    let beside = || Some(own_program().ok()?.with_file_name("spurline")).filter(|file| file.is_file());
    given.map(Path::to_owned).or_else(beside).or_else(|| child::find_program("spurline")).ok_or_else(|| {
        BenchError::Missing("spurline is neither beside this program nor in PATH: name it with --spurline".to_owned())
    })
}

pub fn own_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|e| BenchError::io("can't find this program", &e))
}

/// The place of a run.
pub struct Workplace {
    pub scratch: ScratchDir,
    spurline: Result<PathBuf>,
    load_before: f64,
}

impl Workplace {
    /// A place below `parent`, which `flag` names on the command line.
    /// `Missing` without the folder; `Failed` when nothing can be made there.
    pub fn new(parent: &Path, purpose: &str, flag: &str, spurline: Option<&Path>) -> Result<Workplace> {
        scratch::sweep_stale(parent);
        let scratch = ScratchDir::new(parent, purpose, flag)?;
        Ok(Workplace { scratch, spurline: find_spurline(spurline), load_before: machine::load_average() })
    }

    /// The program under test.
    /// `Missing` without the program.
    pub fn spurline(&self) -> Result<&Path> {
        self.spurline.as_deref().map_err(Clone::clone)
    }

    pub fn describe_machine(&self) -> Value {
        machine::describe_machine(self.scratch.path(), self.scratch.path())
    }

    /// A sentence about other load on the machine.
    pub fn load_note(&self) -> String {
        format!(
            "Load average of this machine: {:.1} before, {:.1} after, on {} processors.",
            self.load_before,
            machine::load_average(),
            machine::cpu_count()
        )
    }

    pub fn log(&self, name: &str) -> Result<PathBuf> {
        Ok(self.scratch.subdir("logs")?.join(format!("{name}.log")))
    }

    /// An empty folder, as a word of a command line.
    pub fn empty_dir(&self, name: &str) -> Result<String> {
        Ok(self.scratch.empty_subdir(name)?.display().to_string())
    }

    /// A mount of `source` with more arguments and variables, at `mnt-NAME`.
    /// When the mount does not answer, with the end of the log.
    pub fn mount(
        &self,
        name: &str,
        source: impl AsRef<OsStr>,
        net: Option<&str>,
        words: &[&str],
        env: &[(&str, &str)],
    ) -> Result<MountUnderTest> {
        let at = self.scratch.subdir(&format!("mnt-{name}"))?;
        let mut command = child::command_in(self.spurline()?, net);
        command.arg("mount").arg(source).arg(&at).args(["--metrics", "none"]).args(words).envs(env.iter().copied());
        MountUnderTest::start(command, self.spurline()?, &at, net, &self.log(name)?)
    }

    /// A node of `source` at `IP:PORT`, with an empty cache.
    /// When the node does not listen, with the end of the log.
    pub fn node(
        &self,
        source: impl AsRef<OsStr>,
        address: &str,
        net: Option<&str>,
        words: &[&str],
        env: &[(&str, &str)],
    ) -> Result<NodeUnderTest> {
        let (ip, port) = address.rsplit_once(':').unwrap_or((address, "0"));
        let name = format!("node-{address}").replace(':', "-");
        let cache = self.empty_dir(&format!("cache-{name}"))?;
        let mut command = child::command_in(self.spurline()?, net);
        command.arg("node").arg("--source").arg(source).args(["--cache-dir", &cache, "--group-network", ip]);
        command
            .args(["--group-port", port, "--allow-anyone", "--metrics", "none"])
            .args(words)
            .envs(env.iter().copied());
        NodeUnderTest::start(command, self.spurline()?, address, net, &self.log(&name)?)
    }
}
