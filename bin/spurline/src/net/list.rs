//! `spurline net list`: devices, ports and interfaces as a table. What they are is the fabric crate's to know.

use anstyle::{AnsiColor, Style};
use clap::Args;
use serde_json::json;
use spurline_config::Fault;
use spurline_fabric::{Host, PortState, Tree};
use std::fmt::Write as _;
use std::process::ExitCode;

const HEAD: Style = AnsiColor::Yellow.on_default().bold();
const GOOD: Style = AnsiColor::Green.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();
const DIM: Style = Style::new().dimmed();

/// What `net list` is told.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// None so far.
pub fn run(args: ListArgs) -> Result<ExitCode, Fault> {
    let host = Host::read(&Tree::live());
    if args.json {
        anstream::println!("{}", json!(host));
    } else {
        anstream::print!("{}", show(&host));
    }
    Ok(ExitCode::SUCCESS)
}

fn show(host: &Host) -> String {
    let mut rows = vec![["DEVICE", "PORT", "NETDEV", "LINK", "STATE", "RATE", "PCI"].map(str::to_owned).to_vec()];
    let mut styles = vec![HEAD];
    for device in &host.devices {
        for port in &device.ports {
            let dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
            rows.push(vec![
                device.name.clone(),
                port.number.to_string(),
                dash(port.netdevs.first().cloned()),
                format!("{:?}", port.link_layer),
                format!("{} {}", port.state.word(), port.phys_state.word()),
                dash(port.rate.as_ref().map(|r| r.words())),
                dash(device.pci.as_ref().and_then(|p| p.address.clone())),
            ]);
            styles.push(if port.state == PortState::Active { GOOD } else { BAD });
        }
    }
    let mut out = String::new();
    if host.devices.is_empty() {
        let _ = writeln!(out, "{DIM}no RDMA device{DIM:#}");
    } else {
        table(&mut out, &rows, &styles);
    }
    let mut rows = vec![["INTERFACE", "KIND", "STATE", "MTU", "SPEED"].map(str::to_owned).to_vec()];
    let mut styles = vec![HEAD];
    for i in &host.interfaces {
        rows.push(vec![
            i.name.clone(),
            i.kind.clone().unwrap_or_else(|| "-".to_owned()),
            i.operstate.clone().unwrap_or_else(|| "-".to_owned()),
            i.mtu.map_or_else(|| "-".to_owned(), |m| m.to_string()),
            i.speed_mbps.map_or_else(|| "-".to_owned(), |s| format!("{s} Mb/s")),
        ]);
        styles.push(Style::new());
    }
    table(&mut out, &rows, &styles);
    out
}

/// Columns as wide as their widest cell.
fn table(out: &mut String, rows: &[Vec<String>], styles: &[Style]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for (row, style) in rows.iter().zip(styles) {
        let line: Vec<String> = row.iter().zip(&widths).map(|(text, w)| format!("{text:<w$}")).collect();
        let _ = writeln!(out, "{style}{}{style:#}", line.join("  ").trim_end());
    }
}
