{{/* Names, labels, and what all containers have in common. */}}

{{- define "trainermon.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Room is left for the suffixes of objects. */}}
{{- define "trainermon.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" }}
{{- else if contains (include "trainermon.name" .) .Release.Name }}
{{- .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "trainermon.name" .) | trunc 48 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "trainermon.namespace" -}}
{{ default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{/* Never changed: selectors of Deployment and DaemonSet are immutable. */}}
{{- define "trainermon.selectorLabels" -}}
app.kubernetes.io/name: {{ include "trainermon.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Metadata of an object. Arguments: root, name (suffix, may be empty), component, labels, annotations. */}}
{{- define "trainermon.metadata" -}}
{{- $root := .root -}}
name: {{ include "trainermon.fullname" $root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .namespace | default (include "trainermon.namespace" $root) }}
labels:
  {{- $labels := dict "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") }}
  {{- $_ := set $labels "app.kubernetes.io/version" $root.Chart.AppVersion }}
  {{- $_ := set $labels "app.kubernetes.io/managed-by" $root.Release.Service }}
  {{- $_ := set $labels "app.kubernetes.io/part-of" "trainermon" }}
  {{- with .component }}{{ $_ := set $labels "app.kubernetes.io/component" . }}{{ end }}
  {{- toYaml (merge (include "trainermon.selectorLabels" $root | fromYaml) $labels (.labels | default dict) $root.Values.commonLabels) | nindent 2 }}
{{- with merge (.annotations | default dict) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "trainermon.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "trainermon.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "trainermon.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Whether an object of the Prometheus operator is wanted: true, false, or auto, where the cluster knows it. */}}
{{- define "trainermon.isWanted" -}}
{{- if eq (toString .enabled) "auto" }}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end }}
{{- else if .enabled }}true{{ end }}
{{- end }}

{{/* Of the restricted Pod Security Standard. Argument: user or null. */}}
{{- define "trainermon.podSecurityContext" -}}
runAsNonRoot: {{ ne (int .) 0 }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "trainermon.containerSecurityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
{{- end }}

{{/* Where the secrets are, for whatever serves HTTP; they are read from files and never stand in a manifest. */}}
{{- define "trainermon.access.env" -}}
{{- with .Values.access }}
{{- if .existingSecret }}
- name: TRAINERMON_TOKEN_FILE
  value: /etc/trainermon/secrets/token
{{- if .readTokenKey }}
- name: TRAINERMON_READ_TOKEN_FILE
  value: /etc/trainermon/secrets/read-token
{{- end }}
{{- if .userKey }}
- name: TRAINERMON_USER
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .userKey }}
- name: TRAINERMON_PASSWORD_FILE
  value: /etc/trainermon/secrets/password
{{- end }}
{{- end }}
{{- if .tls.existingSecret }}
- name: TRAINERMON_TLS_CERT_FILE
  value: /etc/trainermon/tls/tls.crt
- name: TRAINERMON_TLS_KEY_FILE
  value: /etc/trainermon/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "trainermon.access.volumeMounts" -}}
{{- if .Values.access.existingSecret }}
- name: trainermon-secrets
  mountPath: /etc/trainermon/secrets
  readOnly: true
{{- end }}
{{- if .Values.access.tls.existingSecret }}
- name: trainermon-tls
  mountPath: /etc/trainermon/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* Readable by all in the one container that mounts them: its user and the pod's group are not always ours to choose. */}}
{{- define "trainermon.access.volumes" -}}
{{- with .Values.access }}
{{- if .existingSecret }}
- name: trainermon-secrets
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0444
    items:
      - {key: {{ .tokenKey | quote }}, path: token}
      {{- with .readTokenKey }}
      - {key: {{ . | quote }}, path: read-token}
      {{- end }}
      {{- if .userKey }}
      - {key: {{ .passwordKey | quote }}, path: password}
      {{- end }}
{{- end }}
{{- with .tls.existingSecret }}
- name: trainermon-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0444
{{- end }}
{{- end }}
{{- end }}

{{/* How Prometheus reads: part of an endpoint of PodMonitor and ServiceMonitor. */}}
{{- define "trainermon.access.endpoint" -}}
{{- with .Values.access }}
{{- if .tls.existingSecret }}
scheme: https
tlsConfig:
  ca:
    secret:
      name: {{ .tls.existingSecret }}
      key: ca.crt
  {{- with .tls.serverName }}
  serverName: {{ . }}
  {{- end }}
{{- end }}
{{- if and .existingSecret .readTokenKey }}
authorization:
  type: Bearer
  credentials:
    name: {{ .existingSecret }}
    key: {{ .readTokenKey }}
{{- else if and .existingSecret .userKey }}
basicAuth:
  username:
    name: {{ .existingSecret }}
    key: {{ .userKey }}
  password:
    name: {{ .existingSecret }}
    key: {{ .passwordKey }}
{{- end }}
{{- end }}
{{- end }}

{{/* Which pods train; its default would be merged with labels in the values, so it stands here. */}}
{{- define "trainermon.podSelector" -}}
{{- with .Values.podSelector -}}
{{ toYaml . }}
{{- else -}}
matchLabels: {trainermon: "true"}
{{- end }}
{{- end }}

{{/* Labels of the pods in which agents run, as a selector. */}}
{{- define "trainermon.agentSelector" -}}
{{- if eq .Values.mode "daemonset" -}}
matchLabels:
  {{- include "trainermon.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/component: agent
{{- else -}}
{{ include "trainermon.podSelector" . }}
{{- end }}
{{- end }}

{{/* What values.schema.json cannot say. */}}
{{- define "trainermon.check" -}}
{{- with .Values }}
{{- if and .controller.enabled (not .access.existingSecret) }}
{{- fail "controller.enabled needs access.existingSecret: found none, expected the name of a Secret with the token for orders. Create it: kubectl create secret generic trainermon --from-literal=token=$(openssl rand -hex 32)" }}
{{- end }}
{{- if and (or .access.readTokenKey .access.userKey) (not .access.existingSecret) }}
{{- fail "access.readTokenKey and access.userKey need access.existingSecret: the Secret that has them" }}
{{- end }}
{{- if and .access.userKey (not .access.passwordKey) }}
{{- fail "access.userKey needs access.passwordKey: the key of the password in access.existingSecret" }}
{{- end }}
{{- if and (eq .mode "daemonset") (not .daemonset.output.volume) }}
{{- fail "mode daemonset needs daemonset.output.volume: the volume that training pods write their runs to" }}
{{- end }}
{{- if and .controller.enabled (eq .controller.discovery.method "dns") (eq .mode "sidecar") .podSelector.matchExpressions }}
{{- fail "controller.discovery.method dns needs a podSelector of matchLabels alone, because a Service selects by labels only: found matchExpressions. Use method kubernetes" }}
{{- end }}
{{- if and .controller.enabled (eq .controller.discovery.method "static") (not .controller.discovery.agents) }}
{{- fail "controller.discovery.method static needs controller.discovery.agents: a list of host:port" }}
{{- end }}
{{- end }}
{{- end }}
