//! Every reason why an interface cannot be a rail, with the remedy.

/// Why an interface named with --rdma-network cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnusableRail {
    /// There is no such interface.
    #[error("--rdma-network {interface}: there is no interface of that name here")]
    NotThere {
        /// The interface.
        interface: String,
        /// Interfaces that have an RDMA device.
        others: Vec<String>,
    },
    /// No RDMA device belongs to the interface.
    #[error("--rdma-network {interface}: no RDMA device belongs to it ({devices})")]
    NoDevice {
        /// The interface.
        interface: String,
        /// The devices that exist.
        devices: String,
        /// Interfaces that have an RDMA device.
        others: Vec<String>,
    },
    /// The port is not active.
    #[error(
        "--rdma-network {interface}: port {port} of {device} is not active: its state is '{state}', its link '{phys}'"
    )]
    PortDown {
        /// The interface.
        interface: String,
        /// The device.
        device: String,
        /// The port.
        port: u32,
        /// The port's `state`.
        state: String,
        /// The port's `phys_state`.
        phys: String,
        /// Whether a subnet manager has to configure the port.
        infiniband: bool,
    },
    /// The interface has no address that other machines can reach.
    #[error("--rdma-network {interface}: it has no address that other machines can reach{found}")]
    NoAddress {
        /// The interface.
        interface: String,
        /// The addresses.
        found: String,
    },
    /// The device has no GID for the address.
    #[error("--rdma-network {interface}: port {port} of {device} has no GID for {address}; it has {gids}")]
    NoGid {
        /// The interface.
        interface: String,
        /// The device.
        device: String,
        /// The port.
        port: u32,
        /// The address.
        address: String,
        /// The GIDs that exist.
        gids: String,
    },
    /// The limit of locked memory is below the amount that RDMA registers.
    #[error("--rdma-network {interface}: {needed} of memory have to be locked for RDMA, the limit is {limit}")]
    Memlock {
        /// The interface.
        interface: String,
        /// The limit.
        limit: String,
        /// The amount needed.
        needed: String,
        /// The same in KiB, the unit of `ulimit -l`.
        kib: u64,
    },
}

impl UnusableRail {
    /// The interface.
    pub fn interface(&self) -> &str {
        match self {
            UnusableRail::NotThere { interface, .. }
            | UnusableRail::NoDevice { interface, .. }
            | UnusableRail::PortDown { interface, .. }
            | UnusableRail::NoAddress { interface, .. }
            | UnusableRail::NoGid { interface, .. }
            | UnusableRail::Memlock { interface, .. } => interface,
        }
    }

    /// The remedy.
    pub fn remedy(&self) -> String {
        match self {
            UnusableRail::NotThere { others, .. } | UnusableRail::NoDevice { others, .. } => name_others(others),
            UnusableRail::PortDown { interface, infiniband: true, .. } => {
                format!("check the cable and that a subnet manager runs (sminfo), then 'ip link set {interface} up'")
            }
            UnusableRail::PortDown { interface, .. } => {
                format!("check the cable and the switch port, then 'ip link set {interface} up'")
            }
            UnusableRail::NoAddress { interface, .. } => {
                format!("give it one: 'ip address add ADDRESS/BITS dev {interface}'")
            }
            UnusableRail::NoGid { interface, .. } => format!(
                "GIDs are made from the interface's addresses: 'ip link set {interface} down' and up again makes the \
                 driver fill its table anew; show_gids or 'rdma -d link' show it"
            ),
            UnusableRail::Memlock { kib, .. } => Self::memlock_remedy(kib.saturating_mul(1024)),
        }
    }

    /// How to allow `needed` bytes of locked memory, in each environment.
    pub fn memlock_remedy(needed: u64) -> String {
        let kib = needed.div_ceil(1024);
        format!(
            "raise the limit: in a shell 'ulimit -l {kib}' (for a user for good: '* - memlock {kib}' in \
             /etc/security/limits.conf), for systemd LimitMEMLOCK=infinity in the unit, for containerd the same \
             in containerd.service, since containers inherit it, for Kubernetes \
             'securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}' in the pod; or lower --buffer-size"
        )
    }
}

fn name_others(others: &[String]) -> String {
    match others {
        [] => "no interface here has one: install the NIC's driver, or try without hardware: 'modprobe rdma_rxe; \
               rdma link add rxe0 type rxe netdev IF'; or leave --rdma-network out for TCP"
            .to_owned(),
        some => format!("interfaces with an RDMA device are {}", some.join(", ")),
    }
}
