//! Where this process logs to, in the foreground and in the background.

use crate::report;
use spurline_config::{Fault, HostLimits, LogConfig, LogFormat};
use spurline_observe::locate;
use spurline_observe::log::{self, LogSettings};
use spurline_types::ErrorKind;
use std::path::PathBuf;

/// The default log file of a background process.
///
/// # Errors
/// When this user has no directory for logs.
pub fn default_log(host: &HostLimits) -> Result<PathBuf, Fault> {
    match (&host.home, host.root) {
        (Some(home), false) => Ok(home.join(".local/state/spurline/spurline.log")),
        // Not in /tmp itself, where other users can create a file of that name first.
        (None, false) => {
            let dir = locate::make_runtime_dir();
            let dir = dir.map_err(|e| Fault { remedy: LOG_REMEDY.into(), ..Fault::from(e.context("the log")) })?;
            Ok(dir.join("spurline.log"))
        }
        (_, true) => Ok(PathBuf::from("/var/log/spurline.log")),
    }
}

const LOG_REMEDY: &str = "name a writable file with --log (SPURLINE_LOG)";
const FILTER_REMEDY: &str = "write info, debug or crate=level[,…] with --log-filter (SPURLINE_LOG_FILTER)";

/// Starts logging: to the configured file, in the background to the default file, else to standard error. Lines of a
/// file name the `service`.
///
/// # Errors
/// When the filter is wrong or the file can't be opened.
pub fn start_logging(config: &LogConfig, background: bool, host: &HostLimits, service: &str) -> Result<(), Fault> {
    let file = match &config.file {
        None if background => Some(default_log(host)?),
        named => named.clone(),
    };
    if let Some(dir) = file.as_ref().and_then(|f| f.parent())
        && config.file.is_none()
    {
        // Opening the file reports an error.
        let _ = std::fs::create_dir_all(dir);
    }
    let settings = LogSettings {
        file,
        filter: config.filter.clone(),
        json: config.format == LogFormat::Json,
        service: service.to_owned(),
        during_start: Some(|text| report::print_warnings(&[text.to_owned()])),
    };
    log::init_logging(&settings).map_err(|error| {
        let remedy = if error.kind() == ErrorKind::Invalid { FILTER_REMEDY } else { LOG_REMEDY };
        Fault { remedy: remedy.into(), ..Fault::from(error) }
    })
}
