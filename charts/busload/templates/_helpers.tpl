{{/* Everything has this name: the demo, the docs and the Lease know it. */}}
{{- define "busload.name" -}}busload-operator{{- end }}

{{- define "busload.selector" -}}
app.kubernetes.io/name: busload
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "busload.labels" -}}
{{ include "busload.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "busload.metadata" -}}
name: {{ include "busload.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "busload.labels" . | nindent 2 }}
{{- end }}

{{- define "busload.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ required "image.*.tag is empty and so is image.*.digest: set one of them" .tag }}{{ end }}
{{- end }}

{{- define "busload.subject" -}}
- kind: ServiceAccount
  name: {{ include "busload.name" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}

{{/* All that the operator may do in a namespace that it serves. */}}
{{- define "busload.rules" -}}
- apiGroups: [busload.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [busload.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
# Children block the deletion of their owner; some clusters ask for this right then.
- apiGroups: [busload.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
# Children. Server-side apply is a patch, and a create where there was nothing; delete removes children of old forms.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# The annotation that makes the kubelet refresh the limits at once.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}
