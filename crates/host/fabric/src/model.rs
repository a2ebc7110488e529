//! RDMA hardware by vendor and device id: model, driver, highest port rate. Reads nothing.

/// A model of RDMA hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceModel {
    /// The usual name.
    pub name: &'static str,
    /// The kernel module that provides the RDMA device.
    pub rdma_module: &'static str,
    /// Highest rate of a port in Gb/s over InfiniBand or RoCE, of the fastest card with this id; 0 if unknown.
    pub most_gbps: u32,
    /// Whether IPoIB interfaces support connected mode: on Omni-Path, only without acceleration.
    pub connected_ipoib: bool,
    /// Whether this is a virtual function.
    pub is_virtual: bool,
}

const fn current_model(name: &'static str, rdma_module: &'static str, most_gbps: u32) -> DeviceModel {
    DeviceModel { name, rdma_module, most_gbps, connected_ipoib: false, is_virtual: false }
}

const fn old_model(name: &'static str, rdma_module: &'static str, most_gbps: u32) -> DeviceModel {
    DeviceModel { name, rdma_module, most_gbps, connected_ipoib: true, is_virtual: false }
}

const fn vf_model(name: &'static str, rdma_module: &'static str, most_gbps: u32) -> DeviceModel {
    DeviceModel { name, rdma_module, most_gbps, connected_ipoib: false, is_virtual: true }
}

const fn old_vf_model(name: &'static str, rdma_module: &'static str, most_gbps: u32) -> DeviceModel {
    DeviceModel { name, rdma_module, most_gbps, connected_ipoib: true, is_virtual: true }
}

/// Vendor id, device id, model. ConnectX-4 and later use enhanced IPoIB, which is datagram only.
const KNOWN_MODELS: &[(u16, u16, DeviceModel)] = &[
    (0x15b3, 0x5a44, old_model("InfiniHost MT23108", "ib_mthca", 10)),
    (0x15b3, 0x6278, old_model("InfiniHost III Ex MT25208 (Tavor mode)", "ib_mthca", 20)),
    (0x15b3, 0x6282, old_model("InfiniHost III Ex MT25208", "ib_mthca", 20)),
    (0x15b3, 0x5e8c, old_model("InfiniHost III Lx MT25204", "ib_mthca", 20)),
    (0x15b3, 0x6274, old_model("InfiniHost III Lx MT25204", "ib_mthca", 20)),
    (0x15b3, 0x6340, old_model("ConnectX MT25408", "mlx4_ib", 10)),
    (0x15b3, 0x634a, old_model("ConnectX MT25418 DDR", "mlx4_ib", 20)),
    (0x15b3, 0x6354, old_model("ConnectX MT25428 QDR", "mlx4_ib", 40)),
    (0x15b3, 0x6732, old_model("ConnectX MT26418 DDR", "mlx4_ib", 20)),
    (0x15b3, 0x673c, old_model("ConnectX-2 MT26428 QDR", "mlx4_ib", 40)),
    (0x15b3, 0x6750, old_model("ConnectX-2 MT26448 EN", "mlx4_ib", 10)),
    (0x15b3, 0x1003, old_model("ConnectX-3 MT27500", "mlx4_ib", 56)),
    (0x15b3, 0x1004, old_vf_model("ConnectX-3 virtual function", "mlx4_ib", 56)),
    (0x15b3, 0x1007, old_model("ConnectX-3 Pro MT27520", "mlx4_ib", 56)),
    (0x15b3, 0x1011, old_model("Connect-IB MT27600", "mlx5_ib", 56)),
    (0x15b3, 0x1012, old_vf_model("Connect-IB virtual function", "mlx5_ib", 56)),
    (0x15b3, 0x1013, current_model("ConnectX-4 MT27700", "mlx5_ib", 100)),
    (0x15b3, 0x1014, vf_model("ConnectX-4 virtual function", "mlx5_ib", 100)),
    (0x15b3, 0x1015, current_model("ConnectX-4 Lx MT27710", "mlx5_ib", 50)),
    (0x15b3, 0x1016, vf_model("ConnectX-4 Lx virtual function", "mlx5_ib", 50)),
    (0x15b3, 0x1017, current_model("ConnectX-5 MT27800", "mlx5_ib", 100)),
    (0x15b3, 0x1018, vf_model("ConnectX-5 virtual function", "mlx5_ib", 100)),
    (0x15b3, 0x1019, current_model("ConnectX-5 Ex MT28800", "mlx5_ib", 100)),
    (0x15b3, 0x101a, vf_model("ConnectX-5 Ex virtual function", "mlx5_ib", 100)),
    (0x15b3, 0x101b, current_model("ConnectX-6 MT28908", "mlx5_ib", 200)),
    (0x15b3, 0x101c, vf_model("ConnectX-6 virtual function", "mlx5_ib", 200)),
    (0x15b3, 0x101d, current_model("ConnectX-6 Dx MT2892", "mlx5_ib", 200)),
    (0x15b3, 0x101e, vf_model("ConnectX family virtual function", "mlx5_ib", 0)),
    (0x15b3, 0x101f, current_model("ConnectX-6 Lx MT2894", "mlx5_ib", 50)),
    (0x15b3, 0x1021, current_model("ConnectX-7 MT2910", "mlx5_ib", 400)),
    (0x15b3, 0x1023, current_model("ConnectX-8", "mlx5_ib", 800)),
    (0x15b3, 0xa2d2, current_model("BlueField ConnectX-5", "mlx5_ib", 100)),
    (0x15b3, 0xa2d6, current_model("BlueField-2 ConnectX-6 Dx", "mlx5_ib", 200)),
    (0x15b3, 0xa2dc, current_model("BlueField-3 ConnectX-7", "mlx5_ib", 400)),
    (0x1077, 0x7322, old_model("QLogic QLE7340/7342", "ib_qib", 40)),
    (0x8086, 0x24f0, old_model("Omni-Path HFI 100", "hfi1", 100)),
    (0x8086, 0x24f1, old_model("Omni-Path HFI 100 (integrated)", "hfi1", 100)),
    (0x8086, 0x1572, current_model("Ethernet X710", "irdma", 10)),
    (0x8086, 0x37d2, current_model("Ethernet X722", "irdma", 10)),
    (0x8086, 0x1591, current_model("Ethernet E810-C backplane", "irdma", 100)),
    (0x8086, 0x1592, current_model("Ethernet E810-C QSFP", "irdma", 100)),
    (0x8086, 0x1593, current_model("Ethernet E810-C SFP", "irdma", 25)),
    (0x8086, 0x159b, current_model("Ethernet E810-XXV SFP", "irdma", 25)),
    (0x8086, 0x1889, vf_model("Ethernet adaptive virtual function", "irdma", 0)),
    (0x8086, 0x12d2, current_model("Ethernet E830-CC", "irdma", 200)),
    (0x14e4, 0x16d7, current_model("BCM57414 NetXtreme-E", "bnxt_re", 25)),
    (0x14e4, 0x16d8, current_model("BCM57416 NetXtreme-E", "bnxt_re", 10)),
    (0x14e4, 0x1750, current_model("BCM57508 NetXtreme-E", "bnxt_re", 200)),
    (0x14e4, 0x1751, current_model("BCM57504 NetXtreme-E", "bnxt_re", 100)),
    (0x14e4, 0x1752, current_model("BCM57502 NetXtreme-E", "bnxt_re", 50)),
    (0x14e4, 0x1760, current_model("BCM57608 NetXtreme-E", "bnxt_re", 400)),
    (0x1077, 0x1656, current_model("FastLinQ QL41000", "qedr", 25)),
    (0x1077, 0x8070, current_model("FastLinQ QL41000", "qedr", 50)),
    (0x1425, 0x6410, current_model("Chelsio T6225-CR", "iw_cxgb4", 25)),
    (0x1425, 0x640d, current_model("Chelsio T62100-CR", "iw_cxgb4", 100)),
    (0x1d0f, 0xefa0, current_model("Elastic Fabric Adapter", "efa", 100)),
    (0x1d0f, 0xefa1, current_model("Elastic Fabric Adapter (2nd generation)", "efa", 100)),
    (0x1d0f, 0xefa2, current_model("Elastic Fabric Adapter (3rd generation)", "efa", 200)),
    (0x1d0f, 0xefa3, current_model("Elastic Fabric Adapter (4th generation)", "efa", 200)),
    (0x1ded, 0x107f, vf_model("Elastic RDMA adapter (eRDMA)", "erdma", 0)),
    (0x1414, 0x00ba, vf_model("Microsoft Azure Network Adapter", "mana_ib", 200)),
    (0x19e5, 0xa222, current_model("HNS GE/25GE/50GE RDMA network controller", "hns_roce_hw_v2", 50)),
    (0x19e5, 0xa226, current_model("HNS 100GE RDMA network controller", "hns_roce_hw_v2", 100)),
    (0x19e5, 0xa228, current_model("HNS 200GE RDMA network controller", "hns_roce_hw_v2", 200)),
];

/// The model with a PCI vendor and device id.
pub fn model_of(vendor: u16, device: u16) -> Option<DeviceModel> {
    KNOWN_MODELS.iter().find(|(v, d, _)| (*v, *d) == (vendor, device)).map(|(_, _, m)| *m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_named_once() {
        for (i, (vendor, device, _)) in KNOWN_MODELS.iter().enumerate() {
            assert!(!KNOWN_MODELS[..i].iter().any(|(v, d, _)| (v, d) == (vendor, device)), "{vendor:04x}:{device:04x}");
        }
        assert_eq!(model_of(0x15b3, 0x1021).map(|m| (m.name, m.connected_ipoib)), Some(("ConnectX-7 MT2910", false)));
        assert!(model_of(0x15b3, 0x6282).is_some_and(|m| m.connected_ipoib));
        assert_eq!(model_of(0, 0), None);
    }
}
