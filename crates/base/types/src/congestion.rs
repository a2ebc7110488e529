//! The congestion control of TCP connections between mounts and nodes. Sets no socket.

use std::fmt;
use std::str::FromStr;

/// A choice of TCP congestion control.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Congestion {
    /// The host's own, unless that paces (BBR): pacing limits answers to a rate estimated while the reader requested
    /// little, which leaves a fast network idle for milliseconds at a time.
    #[default]
    Auto,
    /// The host's choice.
    System,
    /// The name in the kernel.
    Cubic,
    /// The same; always available and permitted.
    Reno,
    /// The same; for networks that mark congestion (ECN).
    Dctcp,
}

impl Congestion {
    const ALL: [Congestion; 5] =
        [Congestion::Auto, Congestion::System, Congestion::Cubic, Congestion::Reno, Congestion::Dctcp];

    /// The name; for an algorithm, the kernel's.
    pub fn name(self) -> &'static str {
        match self {
            Congestion::Auto => "auto",
            Congestion::System => "system",
            Congestion::Cubic => "cubic",
            Congestion::Reno => "reno",
            Congestion::Dctcp => "dctcp",
        }
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Congestion {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|c| c.name() == s).ok_or_else(|| {
            let all = Self::ALL.map(Congestion::name).join(", ");
            format!("'{s}' is not a supported congestion control; write one of {all}")
        })
    }
}
