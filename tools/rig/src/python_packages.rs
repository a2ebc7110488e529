//! Packages of PyPI in virtual environments, installed once for all tests.

use spurline_testkit::skip;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of the programs of an environment with these packages; `None` prints the reason.
pub fn installed_packages(name: &str, packages: &[&str]) -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools");
    let venv = tools.join(format!("{name}-{}", packages.join("-").replace("==", "-")));
    fs::create_dir_all(&venv).unwrap();
    let lock = File::create(venv.join("lock")).unwrap();
    lock.lock().unwrap();
    let is_ready = venv.join("ready");
    if !is_ready.exists() {
        run_tool(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        run_tool(Command::new(venv.join("bin/pip")).args(["install", "-q"]).args(packages))?;
        fs::write(is_ready, "").unwrap();
    }
    Some(venv.join("bin"))
}

fn run_tool(command: &mut Command) -> Option<()> {
    let why = match command.stdin(Stdio::null()).output() {
        Ok(out) if out.status.success() => return Some(()),
        Ok(out) => String::from_utf8_lossy(&out.stderr).lines().last().unwrap_or_default().to_owned(),
        Err(error) => error.to_string(),
    };
    skip("pypi", &format!("packages can't be installed: {why}"));
    None
}
