//! Logs and metrics: settings and checks. Opens no file and no socket.

#[cfg(feature = "clap")]
use crate::values::parse_log_file;
use crate::values::{LogFormat, absolute_path};
use spurline_types::fault::Fault;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The default address of metrics.
pub const DEFAULT_METRICS: &str = "127.0.0.1:9567";

settings! {
    /// Logs and metrics.
    #[command(next_help_heading = "Logs and metrics")]
    pub struct RawLog {
        /// Log to this file [default: standard error]
        #[arg(long, value_name = "FILE", value_parser = parse_log_file)]
        pub log: Option<PathBuf>,
        /// Log level: error, warn, info, debug, trace, or crate=level[,…] (also RUST_LOG) [default: info]
        #[arg(long, value_name = "FILTER")]
        pub log_filter: Option<String>,
        /// Format of log lines
        #[arg(long, value_name = "FORM", value_enum, default_value_t)]
        pub log_format: LogFormat,
        /// Address of the metrics page (Prometheus); none disables it [default: 127.0.0.1:9567, or the next free port if
        /// that is in use]
        #[arg(long, value_name = "ADDR")]
        pub metrics: Option<String>,
    }
}

/// Logs.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// The file; `None` for standard error.
    pub file: Option<PathBuf>,
    /// The filter; `None` for RUST_LOG or info.
    pub filter: Option<String>,
    /// The line format.
    pub format: LogFormat,
}

/// The metrics page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsConfig {
    /// Disabled.
    Off,
    /// The default address, or another port if that is taken.
    Default,
    /// This address, else an error.
    At(SocketAddr),
}

impl RawLog {
    /// Checks the settings of logs and metrics.
    ///
    /// # Errors
    /// Exit code 2 for wrong values.
    pub fn check(self) -> Result<(LogConfig, MetricsConfig), Fault> {
        let metrics = self.metrics.as_deref().map_or(Ok(MetricsConfig::Default), check_metrics)?;
        let file = self.log.as_deref().map(absolute_path);
        Ok((LogConfig { file, filter: self.log_filter, format: self.log_format }, metrics))
    }
}

fn check_metrics(text: &str) -> Result<MetricsConfig, Fault> {
    if matches!(text, "none" | "off" | "") {
        return Ok(MetricsConfig::Off);
    }
    let full = match text.strip_prefix(':') {
        Some(port) => format!("127.0.0.1:{port}"),
        None if text.parse::<u16>().is_ok() => format!("127.0.0.1:{text}"),
        None => text.replacen("localhost:", "127.0.0.1:", 1),
    };
    match full.parse() {
        Ok(address) => Ok(MetricsConfig::At(address)),
        Err(_) => Err(Fault::usage(
            format!("--metrics '{text}' is not an address and port"),
            format!("write {DEFAULT_METRICS}, [::1]:9567, :9567 or none"),
        )),
    }
}
